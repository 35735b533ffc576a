/// In place of nvml.cpp in a build without CUDA.

#include "offload/nvml.h"

namespace terrace {

std::optional<GpuState> gpu_state(const std::string& /*pci_address*/, std::string* why_not) {
  if (why_not != nullptr) {
    *why_not = "this build has no CUDA (configure with the preset cuda)";
  }
  return std::nullopt;
}

}  // namespace terrace
