#include "offload/choose_device.h"

#include "base/error.h"
#include "base/fallback.h"

namespace terrace {
namespace {

/// A driver, or else the reason.
DeviceChoice look_for_cuda(const WhyProgramCannot& why_program_cannot, const CudaLoader& load) {
  DeviceChoice choice;
  choice.driver = load(&choice.why_not);
  if (choice.driver != nullptr) {
    choice.why_not = why_program_cannot();
  }
  if (!choice.why_not.empty()) {
    choice.driver.reset();
  }
  return choice;
}

}  // namespace

DeviceChoice choose_device(const Config::Device& config, const WhyProgramCannot& why_program_cannot,
                           const CudaLoader& load) {
  if (config.kind == "emulated") {
    return {};
  }
  DeviceChoice choice = look_for_cuda(why_program_cannot, load);
  if (choice.driver == nullptr && config.kind == "cuda") {
    throw ConfigError("device.kind is \"cuda\", but " + choice.why_not,
                      "set device.kind to \"auto\", which emulates a device where there is none");
  }
  if (choice.driver == nullptr) {
    note_fallback("device: emulated on the CPU", choice.why_not, LogLevel::info);
  } else if (config.link || config.latency_us != 0) {
    throw ConfigError("device.link and device.latency_us are of the emulated device, and this one is a CUDA device",
                      "leave them out, or set device.kind to \"emulated\"");
  }
  return choice;
}

}  // namespace terrace
