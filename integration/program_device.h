#pragma once

#include <c10/core/Device.h>

#include "base/config.h"

namespace terrace {

/// Where a program computes with this configuration: `cuda:0`, or the CPU, whether it has a session or not. Throws as a
/// session does where the device cannot be had.
c10::Device program_device(const Config::Device& config);

}  // namespace terrace
