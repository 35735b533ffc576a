/// The policy of residency: a deterministic state machine, events in, actions out.
///
/// It decides which copies exist where; it has no thread, clock, lock, file or memory of chunks. Its owner
/// feeds it events, carries out the actions it takes from it, and reports each one back: a transfer by
/// `transfer_done` or `transfer_failed`, a vacated room by `vacated`. Bytes are counted in the tiers'
/// budgets before an action that needs them is issued and given back after `vacated`.
///
/// Requests. One whose operands are all there is granted at once. The others queue in order; only the first
/// of the queue holds pins and asks for room, evicting the copies used longest ago: a clean one is dropped,
/// a dirty one transferred to its home first. It waits for transfers in flight and never for another
/// holder's pin: where nothing can be evicted and nothing is in flight it is refused with OutOfMemory.
///
/// Homes are inclusive: a copy higher up keeps the room at home. A write supersedes all other copies. A
/// write-back that fails leaves its chunk where it was, dirty; after a second failure every request is
/// refused with that error.
///
/// Not thread-safe; AccessStream serializes it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/chunk.h"
#include "memory/residency.h"
#include "memory/schedule.h"
#include "offload/budget.h"

namespace terrace {

/// What someone waits for: operands to be pinned, or (with no accesses) room on a tier, as for a tensor of the program.
/// Owned by who asks, and kept alive until its verdict is no longer `waiting`.
struct Request {
  enum class Verdict : std::uint8_t { waiting, granted, refused };

  std::span<const Access> accesses;
  std::uint64_t program_bytes = 0;
  Kind program_kind = Kind::other;
  Tier program_tier = Tier::device;

  Verdict verdict = Verdict::waiting;
  std::exception_ptr error;  ///< why it was refused

  /// Set by the policy: which accesses hold a pin while this is the first of the queue.
  std::vector<bool> held;
};

/// Give up the room of a chunk on a tier; carried out at once, then reported by `Policy::vacated`.
struct Vacate {
  ChunkId chunk = 0;
  Tier tier = Tier::device;
};

class Policy {
 public:
  /// `budgets` outlive the policy. `device_chunk_limit` bounds the bytes of chunks on the device, within
  /// its budget.
  Policy(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit);
  /// Gives all room back to the budgets; by then the memory behind it is free.
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  // --- events ---

  /// Registers a chunk and takes its room at home. Throws OutOfMemory, saying who holds what.
  ChunkId add_chunk(const ChunkInfo& info);
  /// Grants, queues or refuses `request`.
  void submit(Request& request);
  /// Ends the pins of a granted request.
  void release(std::span<const Access> accesses);
  void transfer_done(const Transfer& transfer);
  void transfer_failed(const Transfer& transfer, std::exception_ptr error);
  void vacated(const Vacate& vacate);
  /// The chunk's bytes are dead: its copies are dropped without a transfer as soon as nobody uses them.
  /// A write that comes first takes the word back.
  void discard(ChunkId chunk);
  void step_mark();
  /// From now on every request is refused with `error`.
  void fail(std::exception_ptr error);

  // --- actions ---

  std::optional<Vacate> next_vacate();
  std::optional<Transfer> next_transfer();

  // --- what there is ---

  std::size_t chunk_count() const noexcept { return chunks_.size(); }
  const Residency& chunk(ChunkId id) const { return chunks_.at(id); }
  const Schedule& schedule() const noexcept { return schedule_; }
  std::uint64_t chunk_bytes(Tier tier) const noexcept { return chunk_bytes_[index_of(tier)]; }
  std::uint64_t peak_chunk_bytes(Tier tier) const noexcept { return peak_chunk_bytes_[index_of(tier)]; }
  std::size_t waiting() const noexcept { return queue_.size(); }

  /// Throws LogicError if anything that must always hold does not. For tests: linear in the chunks.
  void check_invariants() const;

 private:
  enum class Progress : std::uint8_t { done, blocked };

  bool grantable_now(const Request& request) const;
  void grant(Request& request);
  void refuse(Request& request, std::exception_ptr error);
  void advance();
  Progress advance_program(Request& request);
  Progress advance_accesses(Request& request);
  /// Whether the access holds its pin with the bytes there; starts what is missing.
  bool advance_access(Request& request, std::size_t position);
  /// Room on the tier of the access at `position` that the accesses after it need and do not hold.
  std::uint64_t room_wanted_after(const Request& request, std::size_t position) const;
  void hold(Request& request, std::size_t position);
  void start_arrival(ChunkId id, Tier to);
  void start_transfer(const Transfer& transfer);
  void pin(const Access& access);
  void unpin(const Access& access);
  void supersede_others(ChunkId id, Tier tier);

  bool try_take_room(ChunkId id, Tier tier);
  /// Starts evictions until `bytes` are free or on their way to be. False if there is nothing to wait for.
  bool make_room(Tier tier, std::uint64_t bytes, bool for_chunk);
  std::uint64_t shortage(Tier tier, std::uint64_t bytes, bool for_chunk) const;
  std::optional<ChunkId> victim(Tier tier) const;
  void vacate(ChunkId id, Tier tier);
  void drop_if_dead(ChunkId id);

  /// Who lacks how much, for the message.
  struct Lack {
    Tier tier;
    std::uint64_t bytes;
    std::string what;
    bool for_chunk = false;
    std::uint64_t further_bytes = 0;  ///< what the same request needs besides
    bool evicts = true;               ///< whether all that can leave was made to
  };
  std::exception_ptr out_of_memory(const Lack& lack) const;

  std::array<Budget*, tier_count> budgets_;
  std::uint64_t device_chunk_limit_;
  std::vector<Residency> chunks_;
  std::deque<Request*> queue_;
  std::deque<Vacate> vacates_;
  std::deque<Transfer> transfers_;
  std::array<std::uint64_t, tier_count> chunk_bytes_{};  ///< chunks' share of each budget
  std::array<std::uint64_t, tier_count> peak_chunk_bytes_{};
  std::array<std::uint64_t, tier_count> vacating_bytes_{};  ///< issued as Vacate, not yet reported
  std::array<std::uint64_t, tier_count> leaving_bytes_{};   ///< to be vacated when their write-back is done
  std::uint64_t in_flight_ = 0;                             ///< transfers issued, not yet reported
  std::uint64_t clock_ = 0;                                 ///< logical time of uses
  std::exception_ptr failure_;
  Schedule schedule_;
};

}  // namespace terrace
