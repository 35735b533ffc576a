/// Time for measuring: monotonic, in nanoseconds, with no relation to the time of day. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace terrace {

/// Nanoseconds since an arbitrary moment that is fixed while the machine runs.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Blocks until that moment of `monotonic_ns`; for what stands for something that takes time, never to wait for others.
inline void sleep_until(std::int64_t moment_ns) {
  const std::int64_t left_ns = moment_ns - monotonic_ns();
  if (left_ns > 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
  }
}

/// The time since it was made or restarted.
class Stopwatch {
 public:
  std::int64_t elapsed_ns() const noexcept { return monotonic_ns() - started_ns_; }
  double elapsed_seconds() const noexcept { return static_cast<double>(elapsed_ns()) * 1e-9; }
  void restart() noexcept { started_ns_ = monotonic_ns(); }

 private:
  std::int64_t started_ns_ = monotonic_ns();
};

}  // namespace terrace
