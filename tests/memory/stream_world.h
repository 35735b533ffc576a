/// A whole memory under one access stream: a device, emulated or CUDA's on a driver in software, host arena, and an
/// NVMe store in a temporary folder.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "memory/access_stream.h"
#include "memory/timeline.h"
#include "offload/emulated_device.h"
#include "offload/host_arena.h"
#include "offload/nvme_store.h"
#include "offload/thread_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/software_cuda.h"

namespace terrace {

struct StreamSizes {
  std::size_t granule_bytes = 16 * 1024;
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;  ///< besides staging
  std::uint64_t nvme_extents = 0;
  std::size_t nvme_paths = 1;
  std::uint64_t device_chunk_limit = ~std::uint64_t{0};
  std::size_t prefetch_depth = 0;
  std::uint64_t timeline_bytes = 0;  ///< not counted
  bool cuda = false;
};

class StreamWorld {
 public:
  explicit StreamWorld(const StreamSizes& sizes)
      : owned_device(sizes.cuda ? make_cuda_device_in_software(sizes.device_bytes)
                                : std::make_unique<EmulatedDevice>(sizes.device_bytes)),
        arena(sizes.granule_bytes, TransferService::staging_blocks + sizes.host_bytes / sizes.granule_bytes),
        store(paths(sizes.nvme_paths),
              sizes.nvme_paths * extent_file_bytes(sizes.granule_bytes, sizes.nvme_extents / sizes.nvme_paths),
              sizes.granule_bytes),
        host(Tier::host, arena.capacity_bytes()),
        nvme(Tier::nvme, sizes.nvme_extents * sizes.granule_bytes),
        timeline(sizes.timeline_bytes, {&device.budget(), &host, &nvme}),
        stream({&device.budget(), &host, &nvme}, device, arena, &store, &engine,
               {.device_chunk_limit = sizes.device_chunk_limit,
                .prefetch_depth = sizes.prefetch_depth,
                .timeline = &timeline}) {}

  Pin acquire(ChunkId chunk, Tier tier, Access mode = Access::read) {
    const ChunkAccess access{chunk, tier, mode};
    return stream.acquire({&access, 1});
  }
  CopyState state(ChunkId chunk, Tier tier) const {
    return stream.inspect([&](const Policy& policy) { return policy.chunk(chunk).at(tier).state; });
  }
  void check_invariants() const {
    stream.inspect([](const Policy& policy) { policy.check_invariants(); });
  }

  std::vector<std::filesystem::path> paths(std::size_t count) const {
    std::vector<std::filesystem::path> result;
    for (std::size_t i = 0; i < count; ++i) result.push_back(folder.path() / std::to_string(i));
    return result;
  }

  TemporaryFolder folder;
  FaultInjectingEngine engine{std::make_unique<ThreadEngine>()};
  const std::unique_ptr<Device> owned_device;
  Device& device = *owned_device;
  HostArena arena;
  NvmeStore store;
  Budget host;
  Budget nvme;
  Timeline timeline;
  AccessStream stream;
};

/// The bytes that stand for one writing of a chunk; stamp 0 is zeros, as of a chunk never written.
inline std::vector<std::byte> pattern(std::uint64_t stamp, std::uint64_t bytes) {
  std::vector<std::byte> result(bytes);
  if (stamp == 0) return result;
  std::array<std::uint64_t, 64> block;
  std::uint64_t word = stamp * 0x9e3779b97f4a7c15;
  for (std::uint64_t& each : block) each = word += 0x2545f4914f6cdd1d;
  for (std::uint64_t offset = 0; offset < bytes; offset += sizeof block) {
    block[0] += 1;  // no two blocks are the same
    std::memcpy(result.data() + offset, block.data(), std::min<std::uint64_t>(sizeof block, bytes - offset));
  }
  return result;
}

/// Calls `visit(place, offset, length)` for the contiguous parts of a pinned chunk.
template <class Visit>
void for_each_part(const Pin& pin, std::size_t position, Tier tier, std::uint64_t bytes, Visit&& visit) {
  if (tier == Tier::device) {
    visit(pin.device(position), std::uint64_t{0}, bytes);
    return;
  }
  for (std::uint64_t offset = 0; offset < bytes;) {
    const std::span<std::byte> part = pin.host_bytes(position, offset);
    const std::uint64_t length = std::min<std::uint64_t>(part.size(), bytes - offset);
    visit(part.data(), offset, length);
    offset += length;
  }
}

inline void write_pattern(const Pin& pin, std::size_t position, Tier tier, std::uint64_t bytes, std::uint64_t stamp) {
  const std::vector<std::byte> source = pattern(stamp, bytes);
  for_each_part(pin, position, tier, bytes, [&](std::byte* place, std::uint64_t offset, std::uint64_t length) {
    std::memcpy(place, source.data() + offset, length);
  });
}

inline bool holds_pattern(const Pin& pin, std::size_t position, Tier tier, std::uint64_t bytes, std::uint64_t stamp) {
  const std::vector<std::byte> expected = pattern(stamp, bytes);
  bool same = true;
  for_each_part(pin, position, tier, bytes, [&](std::byte* place, std::uint64_t offset, std::uint64_t length) {
    same = same && std::memcmp(place, expected.data() + offset, length) == 0;
  });
  return same;
}

}  // namespace terrace
