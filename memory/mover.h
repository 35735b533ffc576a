/// Where chunks' bytes physically are, and the copies between places.
///
/// The policy decides, the mover carries out: it maps slots, takes granules and extents, and moves whole
/// chunks between tiers in blocks of a granule. Device and NVMe meet in staging blocks on the host, which
/// are never lent to anything else, so a dirty chunk can always leave the device.
///
/// Threads: `add_chunk`, `place` and `vacate` are called under the access stream's lock; `run` without it,
/// from any thread, for one transfer of a copy at a time (the policy sees to that).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/chunk.h"
#include "memory/policy.h"
#include "memory/usage.h"
#include "offload/device.h"
#include "offload/host_arena.h"
#include "offload/nvme_store.h"

namespace terrace {

/// The physical copies of one chunk; empty where there is none.
struct ChunkPlace {
  ChunkInfo info;
  std::byte* device = nullptr;
  std::vector<std::byte*> host;    // granules, in order
  std::vector<ExtentId> nvme;      // extents of a granule's size, in order
  std::exception_ptr write_error;  // why its extents were lost
};

class Mover {
 public:
  /// Blocks of staging that device and NVMe meet in.
  static constexpr std::size_t staging_blocks = 4;

  /// `store` may be null: no NVMe tier. All outlive the mover. Takes the staging blocks from the arena, in
  /// whose budget the caller has counted them.
  Mover(Device& device, HostArena& arena, NvmeStore* store);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  /// What a copy of `bytes` takes on each tier.
  std::array<std::uint64_t, tier_count> room_bytes(std::uint64_t bytes) const;

  void add_chunk(ChunkId id, const ChunkInfo& info);
  ChunkPlace& place(ChunkId id) { return *places_.at(id); }
  void vacate(const Vacate& vacate);

  /// Moves the bytes. Throws IoError, CorruptData or OutOfMemory; the source keeps its bytes.
  void run(const Transfer& transfer, ChunkPlace& place);

  std::size_t granule_bytes() const noexcept { return arena_.granule_bytes(); }
  MemoryUsage::Moved moved() const;

 private:
  class Staging;

  template <class OnBlock>
  void for_each_block(const ChunkPlace& place, OnBlock&& on_block) const;
  void take_room(Tier tier, ChunkPlace& place);
  void write_extent(ChunkPlace& place, std::size_t block, std::span<const std::byte> bytes);
  void count(Link link, Kind kind, std::uint64_t bytes) noexcept;

  Device& device_;
  HostArena& arena_;
  NvmeStore* store_;
  std::vector<std::unique_ptr<ChunkPlace>> places_;
  std::unique_ptr<Staging> staging_;
  std::array<std::array<std::atomic<std::uint64_t>, kind_count>, link_count> moved_{};
};

}  // namespace terrace
