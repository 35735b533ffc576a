/// What NVIDIA's management library (NVML) says of a GPU, from outside: no context is made for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace terrace {

/// Absent: the GPU or the driver does not say.
struct GpuState {
  struct Link {
    int generation = 0;  ///< of PCIe
    int width = 0;       ///< lanes
  };

  std::string name;
  std::string driver_version;
  std::optional<std::uint64_t> memory_total_bytes;
  std::optional<std::uint64_t> memory_used_bytes;        ///< by all
  std::optional<std::uint64_t> memory_of_process_bytes;  ///< by this process; a container may hide it
  std::optional<Link> link_now;                          ///< an idle GPU turns its link down
  std::optional<Link> link_at_most;
  std::optional<double> power_watts;
  std::optional<int> temperature_celsius;
};

/// The state now of the GPU at `pci_address` (CudaProperties has it), or of the first one if that is empty. Absent,
/// with the reason in `why_not` unless that is null, where the build has no CUDA or the machine no such GPU.
/// Thread-safe.
std::optional<GpuState> gpu_state(const std::string& pci_address, std::string* why_not);

}  // namespace terrace
