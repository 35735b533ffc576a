/// An op that is refused memory, or its operands, fails, where LibTorch would rather warn and compute it another way.
///
/// A batched product in bf16, for one, goes on without oneDNN: to other bits, and oneDNN stays off for the rest of the
/// program. So from a refusal until the thread's outermost op ends, a warning that is given while an error is being
/// handled throws that error again.
///
/// All calls are about the calling thread.
#pragma once

namespace terrace {

class NoFallback {
 public:
  static void begin_op() noexcept { ++depth_; }
  static void end_op() noexcept {
    if (--depth_ == 0 && is_armed_) {
      disarm();
    }
  }
  /// The op that runs, if any, is refused something.
  static void refused() noexcept {
    if (depth_ > 0 && !is_armed_) {
      arm();
    }
  }

 private:
  static void arm() noexcept;
  static void disarm() noexcept;

  static inline constinit thread_local int depth_ = 0;
  static inline constinit thread_local bool is_armed_ = false;
};

}  // namespace terrace
