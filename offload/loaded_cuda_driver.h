#pragma once

#include <memory>
#include <string>

#include "offload/cuda_driver.h"

namespace terrace {

/// Whether this build has the CUDA device.
bool is_built_with_cuda() noexcept;

/// The driver of this machine, libcuda, for the first device that it shows (CUDA_VISIBLE_DEVICES says which). It is
/// loaded at run time: a program that was built with CUDA runs where there is none. The context is the device's primary
/// one, which LibTorch computes in, and is kept for as long as the driver lives.
///
/// Null, with the reason in `why_not` unless that is null, where the build has no CUDA, the machine no driver or
/// device, or the device no address ranges over physical memory.
std::shared_ptr<CudaDriver> load_cuda_driver(std::string* why_not);

}  // namespace terrace
