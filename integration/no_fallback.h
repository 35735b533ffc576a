/// An op that is refused memory, or its operands, fails, where LibTorch would rather warn and compute it another way.
///
/// A batched product in bf16, for one, goes on without oneDNN: to other bits, and oneDNN stays off for the rest of the
/// program. So from a refusal until the thread's outermost op ends, a warning that is given while the refusal is being
/// handled throws it again.
///
/// All calls are about the calling thread.
#pragma once

#include <cstdint>

namespace terrace {

class NoFallback {
 public:
  /// Something is recorded: an op, or what a program records itself. Each call is followed by one of `leave`.
  static void enter(bool is_op) noexcept {
    if (depth_ < most_known) {
      ops_ |= std::uint64_t{is_op} << depth_;
    }
    ++depth_;
  }
  static void leave() noexcept {
    --depth_;
    if (depth_ < most_known) {
      ops_ &= ~(std::uint64_t{1} << depth_);
    }
    if (is_armed_ && ops_ == 0) {
      disarm();
    }
  }
  /// The op that runs, if any, is refused something.
  static void refused() noexcept {
    if (ops_ != 0) {
      arm();
    }
  }

 private:
  static constexpr unsigned most_known = 64;  ///< deeper ones are in some op anyway

  static void arm() noexcept;
  static void disarm() noexcept;

  static inline constinit thread_local unsigned depth_ = 0;
  static inline constinit thread_local std::uint64_t ops_ = 0;  ///< a bit for each depth
  static inline constinit thread_local bool is_armed_ = false;
};

}  // namespace terrace
