#include "integration/program_device.h"

#include "integration/cuda_program.h"
#include "offload/choose_device.h"

namespace terrace {

c10::Device program_device(const Config::Device& config) {
  return choose_device(config, load_cuda_program).driver != nullptr ? c10::Device(c10::DeviceType::CUDA, 0)
                                                                    : c10::Device(c10::DeviceType::CPU);
}

}  // namespace terrace
