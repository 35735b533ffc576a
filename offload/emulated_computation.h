/// Computation on the emulated device that is only waited for, such as a benchmark's.
///
/// As on a stream of a GPU, it is queued and runs while the program goes on: each piece begins when the one before it
/// has ended, and no sooner than it is queued. Real computation runs within its op and is over when the op returns, so
/// that it needs no queue. There is one a process. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

namespace terrace {

class EmulatedComputation {
 public:
  static EmulatedComputation& of_this_process() noexcept;

  void queue(double seconds) noexcept;
  /// When what is queued will have ended, on the clock of `monotonic_ns`; in the past where nothing is.
  std::int64_t ends_ns() const noexcept { return ends_ns_.load(std::memory_order_relaxed); }
  /// Blocks until what is queued now has ended.
  void wait() const;

 private:
  std::atomic<std::int64_t> ends_ns_{0};
};

}  // namespace terrace
