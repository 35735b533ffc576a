#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/config.h"
#include "offload/cuda_driver.h"
#include "offload/loaded_cuda_driver.h"

namespace terrace {

/// What a session's device is.
struct DeviceChoice {
  std::shared_ptr<CudaDriver> driver;  ///< of the CUDA device; null: it is emulated
  std::string why_not;                 ///< why it is not a CUDA device; empty where it is, or was not to be
};

/// Why the program itself cannot compute on CUDA; empty if it can. Asked only where there is a driver.
using WhyProgramCannot = std::function<std::string()>;
using CudaLoader = std::function<std::shared_ptr<CudaDriver>(std::string* why_not)>;

/// The device that `config.kind` asks for: for "auto" a CUDA device where there is one, and the emulated one elsewhere,
/// which is noted with the reason.
///
/// Throws ConfigError for "cuda" where there is no CUDA device, and where the emulated device's settings (link,
/// latency_us) meet a CUDA device.
DeviceChoice choose_device(const Config::Device& config, const WhyProgramCannot& why_program_cannot,
                           const CudaLoader& load = load_cuda_driver);

}  // namespace terrace
