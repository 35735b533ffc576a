/// Where chunks' bytes physically are: slots on the device, granules on the host, extents on NVMe.
///
/// The policy decides, this takes the room and gives it back, and says how the transfer service is to move a chunk.
///
/// Threads: `add_chunk`, `vacate`, `used`, `place` and `request` are called under the access stream's lock; what a
/// request does later runs without it, for one transfer to a copy at a time (the policy sees to that).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "memory/chunk.h"
#include "memory/device_idle.h"
#include "memory/policy.h"
#include "memory/use_fences.h"
#include "offload/device.h"
#include "offload/host_arena.h"
#include "offload/nvme_store.h"
#include "offload/transfer.h"

namespace terrace {

/// Memory of the device that the program has allocated (see Device::allocate).
struct Allocation {
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
};

/// The physical copies of one chunk; empty where there is none.
struct ChunkPlace {
  ChunkInfo info;
  std::byte* device = nullptr;
  Allocation adopted;                 // what `device` lies in, where that is no slot
  std::vector<std::byte*> host;       // granules, in order
  std::vector<ExtentId> nvme;         // extents of a granule's size, in order
  std::vector<ExtentId> bad_extents;  // those of them that could not be written
  std::exception_ptr write_error;     // why
  std::uint64_t last_use = 0;         // on the device (see use_fences.h)
};

class ChunkPlaces {
 public:
  /// `store` may be null: no NVMe tier. All outlive this object.
  ChunkPlaces(Device& device, HostArena& arena, NvmeStore* store)
      : device_(device), arena_(arena), store_(store), uses_(device) {}
  ~ChunkPlaces();
  ChunkPlaces(const ChunkPlaces&) = delete;
  ChunkPlaces& operator=(const ChunkPlaces&) = delete;

  /// What a copy of `bytes` takes on each tier.
  std::array<std::uint64_t, tier_count> room_bytes(std::uint64_t bytes) const;

  void add_chunk(ChunkId id, const ChunkInfo& info);
  /// Extents for so many bytes, with the space for them on the drive. Throws IoError. Needs no lock.
  std::vector<ExtentId> reserve_extents(std::uint64_t bytes);
  /// Where the chunk, which has none yet, is on NVMe.
  void set_extents(ChunkId id, std::vector<ExtentId> extents) { places_.at(id)->nvme = std::move(extents); }
  const ChunkPlace& place(ChunkId id) const { return *places_.at(id); }
  /// The chunk, which has no place on the device, has one there from now on; without memory, it has none any more.
  void adopt(ChunkId id, const Allocation& allocation, std::uint64_t offset);
  void vacate(const Vacate& vacate);
  /// Computation has been issued that uses those of the chunks that are accessed on the device.
  void used(std::span<const ChunkAccess> accesses);

  /// The movement of a whole chunk, which takes the room it needs; all but `done`.
  TransferRequest request(const Transfer& transfer);
  /// The transfer has succeeded: a write that failed before is made good.
  void done(const Transfer& transfer);
  /// The transfer has failed: extents that could not be written are not used again.
  void failed(const Transfer& transfer);
  /// It ended as Unanswered: what the kernel may still use of it is not used again.
  void abandon(const Transfer& transfer);

  std::size_t granule_bytes() const noexcept { return arena_.granule_bytes(); }

  /// For a thread that begins to wait now.
  DeviceIdle device_idle() const noexcept { return DeviceIdle(device_); }

 private:
  std::size_t granules_of(std::uint64_t bytes) const noexcept {
    return static_cast<std::size_t>((bytes + granule_bytes() - 1) / granule_bytes());
  }
  TransferPlaces take_room(const Transfer& transfer, ChunkPlace& place);
  void leave_device(const ChunkPlace& place) noexcept;
  Fence free_after(const Transfer& transfer, const ChunkPlace& place);

  Device& device_;
  HostArena& arena_;
  NvmeStore* store_;
  std::vector<std::unique_ptr<ChunkPlace>> places_;
  UseFences uses_;
  std::optional<ChunkId> last_used_;
  Fence vacated_{};  ///< the last use of all that has left the device
};

}  // namespace terrace
