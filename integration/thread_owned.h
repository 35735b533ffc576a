/// One object of a type for each thread, which is made when the thread first asks and ends with it.
///
/// Destructors of the thread's other variables may run ops after it is gone, so that it is known by what has no
/// destructor: nobody meets it then. To look for it costs no more than a pointer.
#pragma once

namespace terrace {

template <class T>
class ThreadOwned {
 public:
  /// Null once the thread's is gone.
  static T* get() {
    if (value_ == nullptr && !is_over_) {
      static thread_local Holder holder;
      value_ = &holder.value;
    }
    return value_;
  }
  /// Null also where it was not made.
  static T* get_if_made() noexcept { return value_; }

 private:
  struct Holder {
    Holder() = default;
    ~Holder() {
      value_ = nullptr;
      is_over_ = true;
    }
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;

    T value;
  };

  static inline constinit thread_local T* value_ = nullptr;
  static inline constinit thread_local bool is_over_ = false;
};

}  // namespace terrace
