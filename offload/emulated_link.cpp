#include "offload/emulated_link.h"

#include <algorithm>

#include "base/clock.h"

namespace terrace {

std::int64_t EmulatedLink::carry(std::uint64_t bytes, std::int64_t after_ns) noexcept {
  if (speed_.bytes_per_second == 0) {
    return speed_.latency_ns == 0 ? after_ns : std::max(after_ns, monotonic_ns()) + speed_.latency_ns;
  }
  const double seconds = static_cast<double>(bytes) / static_cast<double>(speed_.bytes_per_second);
  const std::lock_guard lock(mutex_);
  free_ns_ = std::max({free_ns_, after_ns, monotonic_ns()}) + static_cast<std::int64_t>(seconds * 1e9);
  return free_ns_ + speed_.latency_ns;
}

}  // namespace terrace
