/// The only way from above to chunks and to room on the device: acquire, release, allocate, free, step.
///
/// It drives the policy (access_stream.cpp), and counts what that costs (access_stream_notes.cpp): events go in under
/// one mutex, transfers are started with the transfer service, whose threads report them done. A failed transfer
/// reaches whoever needs its bytes. Chunks are named by id; where their bytes are is known while they are pinned.
///
/// Thread-safe. A thread may hold several pins; it is never made to wait for another thread's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <oneapi/tbb/mutex.h>

#include "memory/chunk_places.h"
#include "memory/policy.h"
#include "memory/timeline.h"
#include "memory/usage.h"
#include "offload/transfer_service.h"

namespace terrace {

class AccessStream;

/// Work that has to be done before chunks may be used: queued updates of them.
class PriorWork {
 public:
  virtual ~PriorWork() = default;
  /// Called by a thread that is about to use the chunks, under no lock: returns when nothing is owed to them. What it
  /// throws is what the access throws.
  virtual void before_access(std::span<const ChunkAccess> accesses) = 0;
};

/// Who holds room on the device that can be done without, as a pool does that keeps what the program has freed.
class SpareRoom {
 public:
  virtual ~SpareRoom() = default;
  /// Called under no lock of the stream, by a thread whose request found no room on the device. Whether anything was
  /// given back to the device's budget, or can leave the device now that could not before.
  virtual bool give_back() noexcept = 0;
};

/// Who asks: the program in its course, which is learned from; the program beside it, between two steps; or prior work,
/// done by a thread of the program or by one in the background. What the latter waits for stalls nobody.
enum class AccessOrigin : std::uint8_t { program, beside_program, prior_work, background_work };

constexpr bool is_prior_work(AccessOrigin origin) noexcept { return origin >= AccessOrigin::prior_work; }

/// Holds chunks where they are, for as long as this object lives. Movable; any thread may end it.
class Pin {
 public:
  Pin() noexcept = default;
  Pin(Pin&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)),
        held_(std::move(other.held_)),
        places_(std::move(other.places_)) {}
  Pin& operator=(Pin&& other) noexcept;
  ~Pin() { release(); }

  void release() noexcept;

  /// The address of the `position`-th acquired chunk on the device.
  std::byte* device(std::size_t position) const { return places_.at(position)->device; }
  /// The granules of the `position`-th acquired chunk on the host, in order.
  std::span<std::byte* const> host(std::size_t position) const { return places_.at(position)->host; }
  /// The address of element byte `offset` of the `position`-th chunk on the host, and how many bytes follow
  /// it in the same granule.
  std::span<std::byte> host_bytes(std::size_t position, std::uint64_t offset) const;

 private:
  friend class AccessStream;

  AccessStream* stream_ = nullptr;
  std::vector<ChunkAccess> held_;
  std::vector<const ChunkPlace*> places_;
};

/// A chunk on the host that is read there once, as soon as it has come: it stays for as long as this object lives, and
/// writes wait for that. Movable; any thread may end it.
class HostReading {
 public:
  HostReading(HostReading&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)),
        chunk_(other.chunk_),
        writes_(other.writes_),
        host_(other.host_) {}
  HostReading& operator=(HostReading&&) = delete;
  ~HostReading();

  ChunkId chunk() const noexcept { return chunk_; }
  /// Its bytes are these as long as AccessStream::writes says the same.
  std::uint64_t writes() const noexcept { return writes_; }
  /// Its granules, in order.
  std::span<std::byte* const> host() const noexcept { return host_; }

 private:
  friend class AccessStream;
  HostReading(AccessStream& stream, ChunkId chunk, std::uint64_t writes, std::span<std::byte* const> host) noexcept
      : stream_(&stream), chunk_(chunk), writes_(writes), host_(host) {}

  AccessStream* stream_;
  ChunkId chunk_;
  std::uint64_t writes_;
  std::span<std::byte* const> host_;
};

class AccessStream {
 public:
  struct Options {
    std::uint64_t device_chunk_limit = ~std::uint64_t{0};  ///< as in Policy
    std::size_t prefetch_depth = 0;                        ///< as in Policy
    std::size_t most_transfers = 1024;                     ///< at a time, below TransferService::most_transfers
    std::size_t nvme_depth = 0;                            ///< as in TransferService
    std::size_t staging_blocks_each_way = TransferService::staging_blocks_each_way;  ///< as in TransferService
    Processors transfer_processors{};                                                ///< as in TransferService
    Timeline* timeline = nullptr;  ///< outlives the stream; null: nothing is recorded
  };

  /// `budgets` are those of the tiers. `store` and `engine` are null where there is no NVMe tier. The staging
  /// blocks are counted in the host's budget here (Throws OutOfMemory). All outlive the stream.
  AccessStream(std::array<Budget*, tier_count> budgets, Device& device, HostArena& arena, NvmeStore* store,
               IoEngine* engine, const Options& options);
  AccessStream(const AccessStream&) = delete;
  AccessStream& operator=(const AccessStream&) = delete;

  /// Registers a chunk, which until it is written reads as zeros, one of gradients or activations as anything. Throws
  /// OutOfMemory if it cannot rest at `home`, and IoError where that is a drive that has no space for it.
  ChunkId add_chunk(Kind kind, std::uint32_t index, std::uint64_t bytes, Tier home) {
    return add_chunk(kind, index, bytes, home, ChunkOptions{});
  }
  struct ChunkOptions {
    /// One of the same kind, size and home that was removed: the new chunk takes its id, and with that its place in
    /// what is known of the future. Where something of it is left still, the new one gets an id of its own.
    std::optional<ChunkId> in_place_of;
    /// What a copy takes from the device's budget, where that is more than a slot.
    std::uint64_t device_room_bytes = 0;
  };
  ChunkId add_chunk(Kind kind, std::uint32_t index, std::uint64_t bytes, Tier home, const ChunkOptions& options);
  /// The program has made the bytes of a chunk that has none, `offset` bytes into memory that it has allocated on the
  /// device, of the size that the chunk was given as `device_room_bytes`; it was counted as `counted_as`. The chunk
  /// lies there from now on, and gives that memory back.
  void adopt(ChunkId chunk, const Allocation& allocation, std::uint64_t offset, Kind counted_as);

  /// Waits until every operand is at its tier and pins it there. Throws OutOfMemory (nothing more can
  /// leave), IoError or CorruptData (its bytes could not be brought), LogicError (a chunk is wanted on a
  /// tier while it is held on another and would change).
  Pin acquire(std::span<const ChunkAccess> accesses, AccessOrigin origin = AccessOrigin::program);
  /// The same without a Pin: until `release` is called with the same accesses. Fills `places` with where the chunk of
  /// each is until then.
  void acquire(std::span<const ChunkAccess> accesses, AccessOrigin origin, std::span<const ChunkPlace*> places);
  void release(std::span<const ChunkAccess> accesses) noexcept;

  /// Whether `acquire` would find all operands there now.
  bool can_acquire(std::span<const ChunkAccess> accesses) const {
    const Lock lock(mutex_);
    return policy_.can_grant(accesses);
  }

  /// `work` is asked before every access of the program; null: nothing is owed. Not while another thread acquires.
  void set_prior_work(PriorWork* work) noexcept { prior_work_ = work; }
  /// Does what is owed to the chunks, as `acquire` would.
  void settle_prior_work(std::span<const ChunkAccess> accesses) {
    if (prior_work_ != nullptr) prior_work_->before_access(accesses);
  }

  /// As Policy does.
  void set_read_on_arrival(ChunkId chunk, bool wanted);
  /// Waits for a chunk that is to be read on arrival and is there; for one reader alone. Once `stop` is set it gives
  /// what is there still, and then nothing. Whoever sets `stop` calls `wake_reader` after it, and has first taken back
  /// what is not to be read any more: else what would bring it waits for a reader that is not there.
  std::optional<HostReading> await_reading(const std::atomic<bool>& stop);
  void wake_reader() noexcept;
  /// How often the chunk may have been changed.
  std::uint64_t writes(ChunkId chunk) const;

  /// `room` is asked before a request is refused for want of room on the device, after those that were added before. It
  /// is removed while no other thread wants any there.
  void add_spare_room(SpareRoom& room);
  void remove_spare_room(SpareRoom& room) noexcept;

  // What is known of the future: see Policy.
  bool begin_pass(ScheduleBook::Key key, ScheduleBook::End end = ScheduleBook::End::step,
                  std::optional<ChunkId> first = std::nullopt);
  void expect_step();
  void announce(std::vector<ChunkId> chunks);
  void set_update_queued(std::span<const ChunkId> chunks, bool queued);
  void update_done(ChunkId gradient);
  void set_updates_awaited(bool awaited);

  /// Room for a tensor of the program, which chunks leave for if need be. Throws OutOfMemory.
  void allocate(std::uint64_t bytes, Kind kind, Tier tier = Tier::device);
  void free(std::uint64_t bytes, Kind kind, Tier tier = Tier::device) noexcept;

  /// The chunk's bytes are dead: no transfer is spent on them. A write takes it back.
  void discard(ChunkId chunk);
  /// The chunk is no more: its room is given up on every tier as soon as nobody uses it. Asking for it later throws
  /// LogicError.
  void remove_chunk(ChunkId chunk);

  /// For a thread of the program that waits for an update, and then notes for how long the device was idle meanwhile.
  DeviceIdle device_idle() const noexcept { return places_.device_idle(); }
  /// The calling thread, one of the program's, has waited for another to update a chunk, or to find the norm.
  void note_wait_for_update(std::optional<ChunkId> chunk, std::int64_t begin_ns, std::int64_t end_ns) noexcept;
  /// The set of chunks in which this parameter chunk is was updated, or (without one) the norm, or a part of it, found.
  void note_update(std::optional<ChunkId> parameter, std::int64_t begin_ns, std::int64_t end_ns) noexcept;
  /// The calling thread, one of the program's, has spent so long on the arithmetic of an update.
  void note_update_arithmetic(std::int64_t ns) noexcept;

  /// Ends a step of the schedule and of the step peaks.
  void step_mark();
  /// As TransferService does.
  void hold_arena(std::uint64_t most_bytes) { transfers_.hold_arena(most_bytes); }
  void let_go_of_arena() { transfers_.let_go_of_arena(); }

  MemoryUsage usage() const;
  std::uint64_t granule_bytes() const noexcept { return places_.granule_bytes(); }
  std::array<std::uint64_t, tier_count> room_bytes(std::uint64_t bytes) const { return places_.room_bytes(bytes); }

  /// Calls `look(const Policy&)` under the lock, for tests and reports.
  template <class Look>
  auto inspect(Look&& look) const {
    const std::unique_lock lock(mutex_);
    return look(std::as_const(policy_));
  }

 private:
  friend class HostReading;

  using Lock = std::unique_lock<oneapi::tbb::mutex>;
  using Arrival = std::pair<ChunkId, Tier>;

  /// Returns when the request is granted; throws why it was refused.
  void ask(Request& request, Lock& lock, AccessOrigin origin);
  /// Returns when there is a verdict.
  void submit(Request& request, Lock& lock, AccessOrigin origin);
  /// Whether spare room was given back for a request that was refused, which is asked for again then.
  bool may_ask_again(Request& request, Lock& lock);
  /// Waits for the verdict, and counts that by cause.
  void await_verdict(const Request& request, Lock& lock, AccessOrigin origin);
  void note_stall(const Wait& wait, std::int64_t begin_ns, std::int64_t end_ns, const Lock& lock) noexcept;
  /// What has moved, been waited for and been spent on updates so far.
  MemoryUsage::AtStepEnd totals(const Lock& lock, std::int64_t* at_ns = nullptr) const;
  std::optional<ChunkName> chunk_name(std::optional<ChunkId> chunk, const Lock& lock) const;
  /// Has everything carried out that the policy has decided, which after most ops is nothing.
  void carry_out(const Lock& lock) {
    if (policy_.has_decided()) carry_out_decisions(lock);
  }
  void carry_out_decisions(const Lock& lock);
  void set_space_aside(ChunkId chunk, std::uint64_t bytes);
  void start(const Transfer& transfer);
  void hurry(const Arrival& arrival);
  void finished(const Transfer& transfer, std::exception_ptr error) noexcept;
  template <class Event>
  void guarded(Event&& event) noexcept;
  void end_reading(ChunkId chunk) noexcept;
  /// Has the timeline see, now and then, what is used.
  void sample_usage() noexcept;

  const std::array<Budget*, tier_count> budgets_;
  Timeline* const timeline_;
  Reservation staging_;
  mutable oneapi::tbb::mutex mutex_;  ///< each op takes it twice, mostly alone: then it costs half of std::mutex
  std::condition_variable_any changed_;
  std::condition_variable_any reading_there_;
  Policy policy_;
  ChunkPlaces places_;
  const std::size_t most_under_way_;
  std::map<Arrival, TransferId> under_way_;
  std::set<Arrival> awaited_;  ///< what is to be a demand from its start, as it could not start yet
  PriorWork* prior_work_ = nullptr;
  std::vector<SpareRoom*> spare_rooms_;
  std::array<std::uint64_t, tier_count> step_peaks_{};
  std::array<std::int64_t, stall_cause_count> stalled_ns_{};  ///< by cause
  std::int64_t update_ns_ = 0;                                ///< that the program has spent on updates
  MemoryUsage::AtStepEnd at_step_end_;
  TransferService transfers_;  // last: its threads report to all of the above
};

}  // namespace terrace
