/// Time for measuring: monotonic, in nanoseconds, with no relation to the time of day. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>

namespace terrace {

/// Nanoseconds since an arbitrary moment that is fixed while the machine runs.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
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
