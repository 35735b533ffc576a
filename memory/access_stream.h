/// The only way from above to chunks and to room on the device: acquire, release, allocate, free, step.
///
/// It drives the policy: events go in under one mutex, and transfers are carried out without it, by the
/// threads that wait for something. A failed transfer reaches whoever needs its bytes. Chunks are named by
/// id; where their bytes are is known while they are pinned.
///
/// Thread-safe. A thread may hold several pins; it is never made to wait for another thread's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "memory/mover.h"
#include "memory/policy.h"
#include "memory/usage.h"

namespace terrace {

class AccessStream;

/// Holds chunks where they are, for as long as this object lives. Movable; any thread may end it.
class Pin {
 public:
  Pin() noexcept = default;
  Pin(Pin&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)), held_(std::move(other.held_)) {}
  Pin& operator=(Pin&& other) noexcept;
  ~Pin() { release(); }

  void release() noexcept;

  /// The address of the `position`-th acquired chunk on the device.
  std::byte* device(std::size_t position) const { return held_.at(position).second->device; }
  /// The granules of the `position`-th acquired chunk on the host, in order.
  std::span<std::byte* const> host(std::size_t position) const { return held_.at(position).second->host; }
  /// The address of element byte `offset` of the `position`-th chunk on the host, and how many bytes follow
  /// it in the same granule.
  std::span<std::byte> host_bytes(std::size_t position, std::uint64_t offset) const;

 private:
  friend class AccessStream;

  AccessStream* stream_ = nullptr;
  std::vector<std::pair<Access, const ChunkPlace*>> held_;
};

class AccessStream {
 public:
  /// `budgets` are those of the tiers, `device_chunk_limit` as in Policy. `store` may be null. The staging
  /// blocks are counted in the host's budget here (Throws OutOfMemory). All outlive the stream.
  AccessStream(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit, Device& device,
               HostArena& arena, NvmeStore* store);
  AccessStream(const AccessStream&) = delete;
  AccessStream& operator=(const AccessStream&) = delete;

  /// Registers a chunk, which reads as zeros until it is written. Throws OutOfMemory if it cannot rest at
  /// `home`.
  ChunkId add_chunk(Kind kind, std::uint32_t index, std::uint64_t bytes, Tier home);

  /// Waits until every operand is at its tier and pins it there. Throws OutOfMemory (nothing more can
  /// leave), IoError or CorruptData (its bytes could not be brought), LogicError (a chunk is wanted on a
  /// tier while it is held on another and would change).
  Pin acquire(std::span<const Access> accesses);

  /// Room for a tensor of the program, which chunks leave for if need be. Throws OutOfMemory.
  void allocate(std::uint64_t bytes, Kind kind, Tier tier = Tier::device);
  void free(std::uint64_t bytes, Kind kind, Tier tier = Tier::device) noexcept;

  /// The chunk's bytes are dead: no transfer is spent on them. A write takes it back.
  void discard(ChunkId chunk);

  /// Ends a step of the schedule and of the step peaks.
  void step_mark();

  MemoryUsage usage() const;
  std::uint64_t granule_bytes() const noexcept { return mover_.granule_bytes(); }
  std::array<std::uint64_t, tier_count> room_bytes(std::uint64_t bytes) const { return mover_.room_bytes(bytes); }

  /// Calls `look(const Policy&)` under the lock, for tests and reports.
  template <class Look>
  auto inspect(Look&& look) const {
    const std::unique_lock lock(mutex_);
    return look(std::as_const(policy_));
  }

 private:
  friend class Pin;
  using Lock = std::unique_lock<std::mutex>;

  void release(const Pin& pin) noexcept;
  /// Counts `bytes` in the tier's budget, once there is room for them.
  void make_room(std::uint64_t bytes, Kind kind, Tier tier, Lock& lock);
  void settle(Request& request, Lock& lock);
  void carry_out(const Transfer& transfer, Lock& lock) noexcept;
  void carry_out_vacates(const Lock& lock);
  template <class Event>
  void guarded(Event&& event) noexcept;

  const std::array<Budget*, tier_count> budgets_;
  Reservation staging_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Policy policy_;
  Mover mover_;
  std::array<std::uint64_t, tier_count> step_peaks_{};
  std::atomic<std::int64_t> stalled_ns_{0};
};

}  // namespace terrace
