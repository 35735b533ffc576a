#include "offload/cuda_driver.h"

#include "base/error.h"

namespace terrace {

void throw_cuda_error(std::string_view what, std::string_view name, std::string_view text) {
  const std::string message =
      "device: " + std::string(what) + " failed: " + std::string(text) + " (" + std::string(name) + ")";
  if (name == "CUDA_ERROR_OUT_OF_MEMORY") {
    throw OutOfMemory(message, "lower device.memory, or end other programs that use the GPU");
  }
  throw IoError(message);
}

}  // namespace terrace
