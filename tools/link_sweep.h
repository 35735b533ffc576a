/// Whether the emulated device's link keeps the rate that it is given, each way alone and both at once, when the
/// transfer service drives it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/paired.h"

namespace terrace {

struct PacedLink {
  std::string name;                   ///< "host→device at 500MB/s"
  double configured = 0;              ///< bytes a second, of each direction
  Interval achieved_over_configured;  ///< of the slower direction, where both are busy
  bool judged = true;                 ///< not above 40% of what one core copies
  bool kept = false;                  ///< between 0.97 and 1
};

/// From 0.25 to 2 GB/s; `copy_rate` is what one core of this machine copies. Stops early, with what it has, when `stop`
/// says so.
std::vector<PacedLink> sweep_link_rates(double copy_rate, const std::function<bool()>& stop);

}  // namespace terrace
