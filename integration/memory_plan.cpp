#include "integration/memory_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "memory/timeline.h"
#include "offload/copy_rate.h"
#include "offload/extent_format.h"
#include "offload/host_arena.h"
#include "offload/nvme_paths.h"
#include "offload/nvme_worker.h"
#include "offload/transfer_service.h"

namespace terrace {
namespace {

/// A chunk is small beside the room that chunks move in, and large enough to move at full rate and to leave little of
/// its slot's last granule unused.
std::uint64_t default_chunk_bytes(std::uint64_t device_chunk_limit, std::uint64_t host_bytes,
                                  std::uint64_t slot_granule_bytes) {
  const std::uint64_t smallest = std::max<std::uint64_t>(256 * 1024, 4 * slot_granule_bytes);
  constexpr std::uint64_t largest = 32 * 1024 * 1024;
  return std::clamp(std::bit_floor(std::min(device_chunk_limit / 16, host_bytes / 32) | 1), smallest, largest);
}

/// In bytes per second, 0 for none.
std::uint64_t checked_link(const std::optional<std::uint64_t>& rate) {
  if (!rate) {
    return 0;
  }
  const double copied = measured_copy_rate();
  const auto wanted = static_cast<double>(*rate);
  const std::string figures = "device.link is " + format_bytes(*rate) + "/s, and this machine copies " +
                              format_bytes(static_cast<std::uint64_t>(copied)) + "/s";
  if (wanted > copied) {
    throw ConfigError(figures + ": a link of that rate cannot be emulated", "lower it, or set it to \"unlimited\"");
  }
  if (wanted > 0.4 * copied) {
    log_once("device.link", LogLevel::warning, figures + ": copies take cores that the program needs");
  }
  return *rate;
}

static_assert(Config::Timeline::least_memory >= Timeline::least_bytes);

std::uint64_t whole_chunk(std::uint64_t bytes) {
  constexpr std::uint64_t unit = 4096 * sizeof(float);
  return std::max<std::uint64_t>((bytes + unit - 1) / unit, 1) * unit;
}

/// Enough that what goes between device and NVMe has its share of a drive whose queue is full of what goes between NVMe
/// and host; no more than may be with the drive, and no more than a small part of the host: of a small one, where each
/// block counts, a smaller part.
std::size_t staging_blocks_each_way(const MemoryPlan& plan) {
  constexpr std::uint64_t enough_bytes = std::uint64_t{16} << 20U;
  constexpr std::uint64_t small_host_bytes = std::uint64_t{128} << 20U;
  const std::uint64_t of_host = plan.host_bytes < small_host_bytes ? 128 : 64;
  const std::uint64_t blocks = std::min(enough_bytes, plan.host_bytes / of_host) / plan.granule_bytes;
  return std::max(TransferService::staging_blocks_each_way,
                  std::min(static_cast<std::size_t>(blocks), plan.nvme_depth));
}

void require_staging(const MemoryPlan& plan) {
  const std::uint64_t needed = plan.staging_bytes() + plan.timeline_bytes;
  if (plan.host_bytes >= needed) return;
  throw OutOfMemory("host: host.memory (" + format_bytes(plan.host_bytes) + ") does not hold the " +
                        std::to_string(2 * plan.staging_blocks_each_way) + " staging blocks of " +
                        format_bytes(plan.granule_bytes) + " and the timeline's " + format_bytes(plan.timeline_bytes),
                    "raise host.memory to at least " + format_bytes_exactly(needed + 5 * plan.chunk_bytes) +
                        " or lower placement.chunk or timeline.memory");
}

/// Null where nothing is known of how that drive is best used.
const DriveRates* measured(const std::filesystem::path& folder, const Rates& rates) {
  const auto found = rates.paths.find(path_key(folder));
  // Those of the page cache say nothing of the drive.
  return found != rates.paths.end() && found->second.direct ? &found->second : nullptr;
}

std::size_t granule(const Config& config, std::uint64_t chunk_bytes, const Rates& rates) {
  if (!config.io.block) {
    std::size_t best = 0;
    for (const auto& folder : config.nvme.paths) {
      if (const DriveRates* drive = measured(folder, rates)) best = std::max(best, drive->block_bytes);
    }
    const std::size_t most = best > 0 ? std::min(best, HostArena::most_granule_bytes) : HostArena::most_granule_bytes;
    return HostArena::choose_granule(chunk_bytes, most);
  }
  if (*config.io.block <= chunk_bytes) return static_cast<std::size_t>(*config.io.block);
  throw ConfigError("io.block (" + format_bytes_exactly(*config.io.block) + ") is more than a chunk (" +
                        format_bytes_exactly(chunk_bytes) + ")",
                    "lower io.block, or raise placement.chunk");
}

/// What was measured best for each of the drives, together.
std::size_t nvme_depth(const Config& config, std::size_t block_bytes, const Rates& rates) {
  if (config.io.depth > 0) return static_cast<std::size_t>(config.io.depth);
  std::size_t bytes = 0;
  for (const auto& folder : config.nvme.paths) {
    const DriveRates* drive = measured(folder, rates);
    if (drive == nullptr) return NvmeWorker::default_depth(block_bytes);
    bytes += drive->block_bytes * drive->depth;
  }
  constexpr std::size_t most = 256;
  return std::clamp(bytes / block_bytes, NvmeWorker::fewest_operations, most);
}

/// Of all drives together, which have equal shares of the bytes; 0 where one was not measured.
double rate_of_drives(const Config& config, const Rates& rates, double DriveRates::*rate) {
  double slowest = std::numeric_limits<double>::infinity();
  for (const auto& folder : config.nvme.paths) {
    const DriveRates* drive = measured(folder, rates);
    if (drive == nullptr) return 0;
    slowest = std::min(slowest, drive->*rate);
  }
  return config.nvme.paths.empty() ? 0 : slowest * static_cast<double>(config.nvme.paths.size());
}

}  // namespace

std::uint64_t MemoryPlan::host_memory_for(std::uint64_t bytes) const noexcept {
  const std::uint64_t beside_staging = bytes - std::min(bytes, staging_bytes());
  MemoryPlan larger = *this;
  for (std::uint64_t needed = bytes;;) {
    larger.host_bytes = needed;
    larger.staging_blocks_each_way = terrace::staging_blocks_each_way(larger);
    needed = beside_staging + larger.staging_bytes();
    if (needed <= larger.host_bytes) return larger.host_bytes;
  }
}

std::uint64_t MemoryPlan::nvme_memory_for(std::uint64_t bytes) const {
  const std::uint64_t extents_a_path = (bytes + granule_bytes * nvme_paths - 1) / (granule_bytes * nvme_paths);
  return nvme_paths * extent_file_bytes(granule_bytes, extents_a_path);
}

MemoryPlan plan_memory(const Config& config, std::uint64_t device_bytes, std::uint64_t slot_granule_bytes,
                       std::uint64_t available_bytes, const Rates& rates) {
  MemoryPlan plan;
  plan.device_bytes = device_bytes;
  plan.host_bytes = config.host.memory.value_or(available_bytes / 4);
  plan.device_chunk_limit = std::min(config.device.chunks.value_or(device_bytes), device_bytes);
  plan.chunk_bytes = whole_chunk(config.placement.chunk.value_or(
      default_chunk_bytes(plan.device_chunk_limit, plan.host_bytes, slot_granule_bytes)));
  plan.timeline_bytes = config.timeline.memory.value_or(Config::Timeline::default_memory);
  plan.granule_bytes = granule(config, plan.chunk_bytes, rates);
  plan.granule_count = static_cast<std::size_t>(plan.host_bytes / plan.granule_bytes);
  plan.nvme_depth = config.nvme.paths.empty() ? 0 : nvme_depth(config, plan.granule_bytes, rates);
  plan.nvme_read_rate = rate_of_drives(config, rates, &DriveRates::read);
  plan.nvme_write_rate = rate_of_drives(config, rates, &DriveRates::write);
  plan.staging_blocks_each_way = staging_blocks_each_way(plan);
  require_staging(plan);
  if (const auto& paths = config.nvme.paths; !paths.empty()) {
    plan.nvme_paths = paths.size();
    const std::uint64_t most_unasked = MemoryPlan::most_extents_unasked * HostArena::choose_granule(plan.chunk_bytes);
    plan.nvme_capacity = config.nvme.memory.value_or(std::min(default_nvme_capacity(paths), most_unasked));
    plan.nvme_bytes =
        extents_a_path(paths.size(), plan.nvme_capacity, plan.granule_bytes) * paths.size() * plan.granule_bytes;
  }
  return plan;
}

std::uint64_t emulated_device_bytes(const Config::Device& device, std::uint64_t available_bytes) {
  return device.memory.value_or(available_bytes / 2);
}

LinkSpeed emulated_link(const Config::Device& device) {
  return {.bytes_per_second = checked_link(device.link), .latency_ns = device.latency_us * 1000};
}

}  // namespace terrace
