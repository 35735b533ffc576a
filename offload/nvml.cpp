#include "offload/nvml.h"

#include <dlfcn.h>
#include <nvml.h>
#include <type_traits>
#include <unistd.h>
#include <vector>

#define TERRACE_TEXT_OF(name) #name
#define TERRACE_EXPANDED_TEXT_OF(name) TERRACE_TEXT_OF(name)

namespace terrace {
namespace {

// The library's functions that are called. The header's macros add what the current one of each is called in it.
#define TERRACE_NVML_FUNCTIONS(each)                                                               \
  each(nvmlInit) each(nvmlShutdown) each(nvmlErrorString) each(nvmlSystemGetDriverVersion)         \
      each(nvmlDeviceGetHandleByIndex) each(nvmlDeviceGetHandleByPciBusId) each(nvmlDeviceGetName) \
          each(nvmlDeviceGetMemoryInfo) each(nvmlDeviceGetComputeRunningProcesses)                 \
              each(nvmlDeviceGetCurrPcieLinkGeneration) each(nvmlDeviceGetCurrPcieLinkWidth)       \
                  each(nvmlDeviceGetMaxPcieLinkGeneration) each(nvmlDeviceGetMaxPcieLinkWidth)     \
                      each(nvmlDeviceGetPowerUsage) each(nvmlDeviceGetTemperature)

/// libnvidia-ml.so.1, from `load` to the end of this object's life.
class Nvml {
 public:
  Nvml() = default;
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (began_) {
      nvmlShutdown();
    }
    if (library_ != nullptr) {
      ::dlclose(library_);
    }
  }

#define TERRACE_MEMBER(name) decltype(&::name) name = nullptr;
  TERRACE_NVML_FUNCTIONS(TERRACE_MEMBER)
#undef TERRACE_MEMBER

  /// What went wrong; empty if nothing did.
  std::string load() {
    library_ = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      const char* const reason = ::dlerror();
      return "there is no NVML: " + std::string(reason == nullptr ? "libnvidia-ml.so.1 does not load" : reason);
    }
    std::string missing;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library_, name));
      if (function == nullptr && missing.empty()) {
        missing = "NVML is too old: it has no " + std::string(name);
      }
    };
#define TERRACE_FIND(name) find(name, TERRACE_EXPANDED_TEXT_OF(name));
    TERRACE_NVML_FUNCTIONS(TERRACE_FIND)
#undef TERRACE_FIND
    if (!missing.empty()) {
      return missing;
    }
    const nvmlReturn_t result = nvmlInit();
    began_ = result == NVML_SUCCESS;
    return began_ ? "" : failed("nvmlInit", result);
  }

  std::string failed(const char* call, nvmlReturn_t result) const {
    return "NVML's " + std::string(call) + " failed: " + nvmlErrorString(result);
  }

 private:
  void* library_ = nullptr;
  bool began_ = false;
};

/// What `call(device, &number)` gives, if it gives anything.
template <class Call>
std::optional<unsigned int> number_of(nvmlDevice_t device, Call call) {
  unsigned int number = 0;
  return call(device, &number) == NVML_SUCCESS ? std::optional(number) : std::nullopt;
}

std::optional<GpuState::Link> link_of(std::optional<unsigned int> generation, std::optional<unsigned int> width) {
  if (!generation || !width) {
    return std::nullopt;
  }
  return GpuState::Link{.generation = static_cast<int>(*generation), .width = static_cast<int>(*width)};
}

std::optional<std::uint64_t> memory_of_process(const Nvml& nvml, nvmlDevice_t device) {
  unsigned int count = 0;
  if (nvml.nvmlDeviceGetComputeRunningProcesses(device, &count, nullptr) != NVML_ERROR_INSUFFICIENT_SIZE) {
    return std::nullopt;
  }
  count += 16;  // some may come meanwhile
  std::vector<nvmlProcessInfo_t> processes(count);
  if (nvml.nvmlDeviceGetComputeRunningProcesses(device, &count, processes.data()) != NVML_SUCCESS) {
    return std::nullopt;
  }
  processes.resize(count);
  constexpr unsigned long long not_said = ~0ULL;
  for (const nvmlProcessInfo_t& process : processes) {
    if (process.pid == static_cast<unsigned int>(::getpid()) && process.usedGpuMemory != not_said) {
      return process.usedGpuMemory;
    }
  }
  return std::nullopt;
}

GpuState state_of(const Nvml& nvml, nvmlDevice_t device) {
  GpuState state;
  char text[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "";
  if (nvml.nvmlDeviceGetName(device, text, sizeof text) == NVML_SUCCESS) {
    state.name = text;
  }
  if (nvml.nvmlSystemGetDriverVersion(text, sizeof text) == NVML_SUCCESS) {
    state.driver_version = text;
  }
  nvmlMemory_t memory{};
  if (nvml.nvmlDeviceGetMemoryInfo(device, &memory) == NVML_SUCCESS) {
    state.memory_total_bytes = memory.total;
    state.memory_used_bytes = memory.used;
  }
  state.memory_of_process_bytes = memory_of_process(nvml, device);
  state.link_now = link_of(number_of(device, nvml.nvmlDeviceGetCurrPcieLinkGeneration),
                           number_of(device, nvml.nvmlDeviceGetCurrPcieLinkWidth));
  state.link_at_most = link_of(number_of(device, nvml.nvmlDeviceGetMaxPcieLinkGeneration),
                               number_of(device, nvml.nvmlDeviceGetMaxPcieLinkWidth));
  if (const auto milliwatts = number_of(device, nvml.nvmlDeviceGetPowerUsage)) {
    state.power_watts = *milliwatts / 1000.0;
  }
  const auto temperature = [&](nvmlDevice_t of, unsigned int* celsius) {
    return nvml.nvmlDeviceGetTemperature(of, NVML_TEMPERATURE_GPU, celsius);
  };
  if (const auto celsius = number_of(device, temperature)) {
    state.temperature_celsius = static_cast<int>(*celsius);
  }
  return state;
}

/// Absent, with the reason in `why_not`.
std::optional<GpuState> look(const std::string& pci_address, std::string& why_not) {
  Nvml nvml;
  why_not = nvml.load();
  if (!why_not.empty()) {
    return std::nullopt;
  }
  nvmlDevice_t device = nullptr;
  const nvmlReturn_t result = pci_address.empty() ? nvml.nvmlDeviceGetHandleByIndex(0, &device)
                                                  : nvml.nvmlDeviceGetHandleByPciBusId(pci_address.c_str(), &device);
  if (result != NVML_SUCCESS) {
    why_not = nvml.failed("nvmlDeviceGetHandle", result);
    return std::nullopt;
  }
  return state_of(nvml, device);
}

}  // namespace

std::optional<GpuState> gpu_state(const std::string& pci_address, std::string* why_not) {
  std::string reason;
  std::optional<GpuState> state = look(pci_address, reason);
  if (why_not != nullptr) {
    *why_not = reason;
  }
  return state;
}

}  // namespace terrace
