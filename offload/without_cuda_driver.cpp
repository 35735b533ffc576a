/// In place of loaded_cuda_driver.cpp in a build without CUDA.

#include "offload/loaded_cuda_driver.h"

namespace terrace {

bool is_built_with_cuda() noexcept { return false; }

std::shared_ptr<CudaDriver> load_cuda_driver(std::string* why_not) {
  if (why_not != nullptr) {
    *why_not = "this build has no CUDA (configure with the preset cuda)";
  }
  return nullptr;
}

}  // namespace terrace
