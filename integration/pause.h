/// While one lives on a thread, ops on that thread are not intercepted and their tensors come from LibTorch's
/// previous allocator, uncounted.
#pragma once

namespace terrace {

class Pause {
 public:
  Pause() noexcept { ++depth_; }
  ~Pause() { --depth_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static bool active() noexcept { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace terrace
