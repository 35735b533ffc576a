#include "offload/emulated_computation.h"

#include <algorithm>

#include "base/clock.h"

namespace terrace {

EmulatedComputation& EmulatedComputation::of_this_process() noexcept {
  static EmulatedComputation computation;
  return computation;
}

void EmulatedComputation::queue(double seconds) noexcept {
  const auto lasts_ns = static_cast<std::int64_t>(seconds * 1e9);
  std::int64_t before_ns = ends_ns();
  while (!ends_ns_.compare_exchange_weak(before_ns, std::max(before_ns, monotonic_ns()) + lasts_ns,
                                         std::memory_order_relaxed)) {
  }
}

void EmulatedComputation::wait() const { sleep_until(ends_ns()); }

}  // namespace terrace
