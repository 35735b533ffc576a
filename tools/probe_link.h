/// How fast bytes cross between host and device.
#pragma once

#include <cstdint>
#include <functional>

#include "integration/rates.h"
#include "offload/device.h"

namespace terrace {

/// Copies for half a second each way, through a slot and pinned host memory, in blocks of `block_bytes`, a multiple of
/// 4096. The slot is reserved in the device's budget meanwhile. Ends soon, with figures that mean nothing, once `stop`
/// says so. Throws OutOfMemory where a slot of two blocks does not fit.
LinkRates probe_link(Device& device, std::size_t block_bytes, const std::function<bool()>& stop);

}  // namespace terrace
