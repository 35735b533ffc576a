/// The sizes of a session's tiers and of what they are divided into, decided before any of them is made.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/config.h"
#include "integration/rates.h"
#include "offload/emulated_link.h"

namespace terrace {

struct MemoryPlan {
  /// Extents are kept track of in memory, so that the store has no more of them where its size is not given: of those
  /// of the usual size, as how a drive is best used is not to change how much fits.
  static constexpr std::uint64_t most_extents_unasked = 256 * 1024;

  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t timeline_bytes = 0;         ///< of the host's, for the timeline
  std::uint64_t nvme_bytes = 0;             ///< of extents; 0: there is no such tier
  std::uint64_t nvme_capacity = 0;          ///< of the store's files, headers too
  std::size_t nvme_paths = 0;               ///< that have equal shares of it
  std::uint64_t device_chunk_limit = 0;     ///< most bytes of chunks on the device
  std::uint64_t chunk_bytes = 0;            ///< of a chunk of parameters
  std::size_t granule_bytes = 0;            ///< what slots on the host and extents consist of
  std::size_t granule_count = 0;            ///< on the host
  std::size_t staging_blocks_each_way = 0;  ///< of a granule, between device and NVMe
  std::size_t nvme_depth = 0;               ///< blocks of a granule with the drives at once, each way
  double nvme_read_rate = 0;                ///< of all drives, in bytes per second; 0 where one was not measured
  double nvme_write_rate = 0;

  std::uint64_t staging_bytes() const noexcept { return 2 * staging_blocks_each_way * granule_bytes; }
  /// The least host.memory that holds `bytes`, of which the staging is a part, which grows with it, where chunks are of
  /// this size.
  std::uint64_t host_memory_for(std::uint64_t bytes) const noexcept;
  /// The least nvme.memory whose extents take so many bytes: the files have headers besides.
  std::uint64_t nvme_memory_for(std::uint64_t bytes) const;
};

/// For a device of that budget, whose slots take whole granules of `slot_granule_bytes`, on a machine with so much
/// memory available, and drives of these rates. Changes nothing. Throws OutOfMemory (a budget that holds not even the
/// staging and the timeline, or no extent) or IoError (a path whose free space cannot be told).
MemoryPlan plan_memory(const Config& config, std::uint64_t device_bytes, std::uint64_t slot_granule_bytes,
                       std::uint64_t available_bytes, const Rates& rates);

/// The budget of the emulated device.
std::uint64_t emulated_device_bytes(const Config::Device& device, std::uint64_t available_bytes);

/// The speed of its link. It has to be one that copies on this machine can keep up with: throws ConfigError where they
/// cannot, warns where they come near.
LinkSpeed emulated_link(const Config::Device& device);

}  // namespace terrace
