/// What a run with a configuration would use here. It is decided by what the run decides it by, and tried on small
/// things of its own: no tier is made, so that it may be asked beside a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/fallback.h"
#include "integration/memory_plan.h"
#include "integration/rates.h"
#include "offload/core_shares.h"
#include "offload/cuda_driver.h"
#include "offload/nvml.h"
#include "offload/tier.h"
#include "offload/topology.h"
#include "offload/volume.h"
#include "tools/build_info.h"

namespace terrace {

struct Inspection {
  struct Memory {
    std::uint64_t available_bytes = 0;
    std::optional<std::uint64_t> limit_bytes;  ///< of a container
  };

  struct OfTier {
    Tier tier = Tier::device;
    std::uint64_t budget_bytes = 0;  ///< 0: there is no such tier
    std::string reason;              ///< the setting, or what "auto" stood for
  };

  struct CudaInfo {
    CudaProperties properties;
    CudaMemoryInfo memory;
    std::optional<GpuState> state;  ///< as NVML sees it
  };

  struct DeviceInfo {
    std::string kind;
    std::string reason;
    std::uint64_t budget_bytes = 0;
    std::string automatic_budget;  ///< what device.memory = "auto" stands for
    std::uint64_t slot_granule_bytes = 0;
    std::optional<CudaInfo> cuda;
    std::optional<std::uint64_t> link;  ///< emulated: bytes per second each way; absent: unlimited
    std::int64_t latency_us = 0;
    std::string rates_key;  ///< under which the rates of its link are kept
  };

  struct Path {
    std::filesystem::path folder;
    Volume volume;
    bool direct = false;
    bool space_is_guaranteed = false;
  };

  struct Nvme {
    std::string engine;
    std::vector<Path> paths;
  };

  struct Update {
    std::string instruction_set;
    bool uses_fma = false;
  };

  BuildInfo build;
  Topology topology;
  Memory memory;
  std::vector<OfTier> tiers;
  DeviceInfo device;
  std::optional<Nvme> nvme;
  MemoryPlan plan;
  int threads = 0;           ///< of LibTorch
  int transfer_threads = 0;  ///< one a link
  Update update;
  CoreShares cores;
  std::vector<Fallback> fallbacks;
  Rates rates;
};

/// A session goes by these rates. A GPU is asked for its state, for which CUDA makes its context. A file of one extent
/// is made in each path and removed again, and folders that are not there are made. Throws what a session throws when
/// it begins.
Inspection make_inspection(const Config& config, const Rates& rates);

}  // namespace terrace
