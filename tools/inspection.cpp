#include "tools/inspection.h"

#include <deque>
#include <memory>
#include <span>
#include <string_view>

#include <ATen/Parallel.h>

#include "base/memory_info.h"
#include "base/units.h"
#include "integration/cuda_program.h"
#include "offload/choose_device.h"
#include "offload/choose_engine.h"
#include "offload/cuda_device.h"
#include "offload/emulated_device.h"
#include "offload/extent_file.h"
#include "offload/host_arena.h"
#include "offload/numa.h"
#include "offload/nvme_paths.h"
#include "optimizer/adamw.h"
#include "optimizer/instruction_set.h"

namespace terrace {
namespace {

/// The device that a session would have, and why that one.
Inspection::DeviceInfo device_info(const Config::Device& device, std::uint64_t available_bytes) {
  const DeviceChoice choice = choose_device(device, load_cuda_program);
  Inspection::DeviceInfo info;
  if (choice.driver != nullptr) {
    const CudaProperties properties = choice.driver->properties();
    info.kind = "cuda";
    info.reason = device.kind == "auto" ? "there is one" : "device.kind";
    info.cuda = {properties, choice.driver->memory_info(), gpu_state(properties.pci_address, nullptr)};
    info.budget_bytes = device.memory.value_or(automatic_capacity(info.cuda->memory));
    info.automatic_budget = "what is free of its memory, less a margin";
    info.slot_granule_bytes = choice.driver->granularity();
    info.rates_key = info.kind + ", " + properties.name + " at " + properties.pci_address;
    return info;
  }
  const EmulatedDevice small(1, emulated_link(device));  // notes what it lacks
  info.kind = small.name();
  info.reason = device.kind == "auto" ? choice.why_not : "device.kind";
  info.budget_bytes = emulated_device_bytes(device, available_bytes);
  info.automatic_budget = "half of the available memory";
  info.slot_granule_bytes = small.slot_bytes(1);
  info.link = device.link;
  info.latency_us = device.latency_us;
  info.rates_key = info.kind + ", link " + (info.link ? format_bytes_exactly(*info.link) + "/s" : "unlimited") +
                   ", latency " + std::to_string(info.latency_us) + "us";
  return info;
}

std::vector<Inspection::OfTier> tiers(const Config& config, const Inspection::DeviceInfo& device,
                                      const MemoryPlan& plan) {
  const auto of = [&](Tier tier, std::uint64_t bytes, const std::optional<std::uint64_t>& setting,
                      std::string_view automatic) {
    return Inspection::OfTier{tier, bytes,
                              setting ? std::string(name_of(tier)) + ".memory" : "auto: " + std::string(automatic)};
  };
  std::vector<Inspection::OfTier> all{
      of(Tier::device, plan.device_bytes, config.device.memory, device.automatic_budget),
      of(Tier::host, plan.host_bytes, config.host.memory, "a quarter of the available memory"),
      of(Tier::nvme, plan.nvme_bytes, config.nvme.memory,
         "by the free space, up to " + std::to_string(MemoryPlan::most_extents_unasked) + " blocks")};
  if (config.nvme.paths.empty()) all.back().reason = "nvme.paths is empty";
  return all;
}

/// Opens a queue each way as the transfer service does: what the engine cannot do with their memory is noted.
void try_queues(IoEngine& engine, const MemoryPlan& plan) {
  const std::size_t each_way = plan.staging_blocks_each_way;
  HostArena arena(plan.granule_bytes, 2 * each_way);
  std::vector<std::span<std::byte>> blocks;
  for (std::byte* block : arena.allocate(2 * each_way)) blocks.emplace_back(block, plan.granule_bytes);
  const std::span all(blocks);
  const auto read = engine.open_queue(plan.nvme_depth, all.first(each_way));
  const auto write = engine.open_queue(plan.nvme_depth, all.last(each_way));
}

Inspection::Nvme nvme(const Config& config, const MemoryPlan& plan) {
  const std::unique_ptr<IoEngine> engine = make_io_engine(config.io.engine);
  std::deque<ExtentFile> files;
  for (const std::filesystem::path& folder : config.nvme.paths) {
    make_nvme_folder(folder);
    files.emplace_back(folder, plan.granule_bytes, 1);
  }
  require_nvme_room(config.nvme.paths, plan.nvme_capacity, plan.granule_bytes, Leftovers::still_there);
  Inspection::Nvme found;
  found.engine = engine->name();
  try_queues(*engine, plan);
  for (ExtentFile& file : files) {
    file.reserve_space(0, 1);  // only then does a file system tell whether it sets space aside
    const std::filesystem::path folder = file.file().path.parent_path();
    found.paths.push_back({folder, volume_of(folder), file.direct(), file.space_is_guaranteed()});
  }
  return found;
}

Inspection::Update update() {
  note_instruction_set();
  return {adamw_instruction_set(), adamw_uses_fma()};
}

}  // namespace

Inspection make_inspection(const Config& config, const Rates& rates) {
  Inspection found;
  found.build = build_info();
  found.topology = read_topology();
  found.memory = {available_memory_bytes(), memory_limit_bytes()};
  found.device = device_info(config.device, found.memory.available_bytes);
  found.plan = plan_memory(config, found.device.budget_bytes, found.device.slot_granule_bytes,
                           found.memory.available_bytes, rates);
  found.tiers = tiers(config, found.device, found.plan);
  if (!config.nvme.paths.empty()) found.nvme = nvme(config, found.plan);
  found.threads = at::get_num_threads();
  found.transfer_threads = config.nvme.paths.empty() ? 2 : static_cast<int>(link_count);
  found.update = update();
  found.cores = found.device.cuda ? share_cores(1, numa_node_of_pci(found.device.cuda->properties.pci_address))
                                  : share_cores(found.threads, std::nullopt);
  found.fallbacks = noted_fallbacks();
  found.rates = rates;
  return found;
}

}  // namespace terrace
