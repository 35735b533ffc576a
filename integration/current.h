/// What threads ask for while another may replace it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace terrace {

/// Null at first. Threads: any. To ask costs a load of a flag where it is null. Whoever got what was there before keeps
/// it alive for so long.
template <typename T>
class Current {
 public:
  void set(std::shared_ptr<T> value) noexcept {
    const std::scoped_lock lock(mutex_);
    is_set_.store(value != nullptr, std::memory_order_relaxed);
    value_.swap(value);
  }

  std::shared_ptr<T> get() {
    if (!is_set_.load(std::memory_order_relaxed)) {
      return nullptr;
    }
    const std::scoped_lock lock(mutex_);
    return value_;
  }

 private:
  std::atomic<bool> is_set_{false};
  std::mutex mutex_;
  std::shared_ptr<T> value_;
};

}  // namespace terrace
