/// The policy of residency: a deterministic state machine, events in, actions out.
///
/// It decides which copies exist where; it has no thread, clock, lock, file or memory of chunks. Its owner
/// feeds it events, carries out the actions it takes from it, and reports each one back: a transfer by
/// `transfer_done` or `transfer_failed`, a vacated room by `vacated`. Bytes are counted in the tiers'
/// budgets before an action that needs them is issued and given back after `vacated`.
///
/// Requests. One whose operands are all there is granted at once. The others queue in order, in the lane of the tier
/// they want; only the first of a lane holds pins and asks for room. It waits for transfers in flight and never for
/// another holder's pin: where nothing can be evicted and nothing is in flight it is refused with OutOfMemory.
///
/// Eviction takes the copy that spares the fewest transfers for the time that its room is held: one to bring it back at
/// its next use, unless an update makes it anew before, and, where it is dirty, one to its home, needless if it stays
/// until it is written anew, which counts as several (see policy_room.cpp). Of clean copies that is the one whose next
/// use is furthest away, counted around the end of the pass (Belady, 1966), which is the optimum for those; with dirty
/// ones it is hard to find (Beckmann et al., Writeback-Aware Caching, 2020), and this comes within a few percent of it
/// where room is made on demand. What is brought ahead of need has room made earlier, with fewer copies to choose from.
/// Where nothing is known, the copy used longest ago goes. A clean one is dropped, a dirty one transferred to its home
/// first; or from the device to the host only, where its home is NVMe and it can stay until it is used.
///
/// The future. Of the device, the pass as it was recorded the last time (see schedule.h); of the host, what is
/// announced, each by when the device uses the parameters that are updated with it, what the device will be brought
/// from there until the pass ends, and then what was announced again. Ahead of the cursor, chunks are brought into free
/// room and into that of copies with a later use, so that what is fetched ahead never displaces what is needed sooner.
/// Dirty copies on the device without a further use in the pass leave it at once, so that they can be dropped when
/// their room is needed: to a home on the host, or to the host on their way to NVMe. There they stay until their room
/// is needed, so that what is needed first need not be written and read. Of gradients at home on NVMe those that the
/// update takes next, after as much as the host has room for, stay on the device until it has room for them, in at most
/// half of what the device has for chunks that do not rest there.
///
/// What a pass writes and uses again after long, as gradients that each micro-batch adds to, stays on the host between,
/// as far as that has room for what is away at once, were all of it. One spares as many transfers as another, so it is
/// one of every few. Were it those that leave last, or first, the drive would have all of its work in one part of a
/// backward and none in the other.
///
/// An activation, which the program has made and will read but once, leaves the device at once in the same way where
/// the one that had its id in the last pass had to leave before it was read, or, without such, where any had to. A copy
/// of it stays until its room is wanted. So what the device has room for is not written out. Nor is what has been read,
/// to make room ahead of need: it dies sooner. And where room is wanted at once, but the dirty one that would leave is
/// wanted sooner than others that are being written home already, those are waited for.
///
/// Readers. What work beside the program has to read once, as the sum of a gradient's squares, it is given as soon as
/// it comes to the host. A reader is like a transfer in flight: writes wait for its end, and the copy stays until then.
/// Meanwhile it may be written to NVMe. What is at home there and is to be read goes by the host, which keeps room for
/// two such, rather than straight; what waits on the device for its update comes for the reader and stays there.
///
/// Homes are inclusive: a copy higher up keeps the room at home, until the chunk is removed. A write supersedes all
/// other copies. A write-back that fails leaves its chunk where it was, dirty; after a second failure every request is
/// refused with that error.
///
/// Events and actions are in policy.cpp, who is granted what in policy_requests.cpp and why others wait in
/// policy_waits.cpp, room and eviction in policy_room.cpp, what is brought ahead of need in policy_ahead.cpp, what
/// leaves the device early in policy_done_with.cpp, what is read on the host beside the program in policy_readings.cpp,
/// what must always hold in policy_invariants.cpp.
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
#include <utility>
#include <vector>

#include "memory/chunk.h"
#include "memory/residency.h"
#include "memory/schedule.h"
#include "memory/stall.h"
#include "offload/budget.h"

namespace terrace {

/// What someone waits for: operands to be pinned, or (with no accesses) room on a tier, for a new chunk or for a tensor
/// of the program. Owned by who asks, and kept alive until its verdict is no longer `waiting`.
struct Request {
  enum class Verdict : std::uint8_t { waiting, granted, refused };

  std::span<const ChunkAccess> accesses;
  bool in_schedule = true;             ///< whether it is recorded, and what comes after it in the schedule is expected
  std::optional<ChunkInfo> new_chunk;  ///< to be registered, once there is room for it at home
  std::optional<ChunkId> in_place_of;  ///< whose id it takes: one that is gone
  ChunkId chunk = 0;                   ///< its id, when granted
  /// Nobody waits for it yet (see `Policy::set_updates_awaited`): it takes no room of what is used sooner than what it
  /// is for, and waits until such is used.
  bool patient = false;
  std::uint64_t program_bytes = 0;
  Kind program_kind = Kind::other;
  Tier program_tier = Tier::device;

  Verdict verdict = Verdict::waiting;
  std::exception_ptr error;  ///< why it was refused

  /// Set by the policy: which accesses hold a pin while this is the first of its lane.
  std::vector<bool> held;
  /// Set by the policy: what leaves the tier has been asked to hurry.
  bool hurried = false;
};

/// Why a request waits at one moment.
struct Wait {
  StallCause cause = StallCause::device_room;
  std::optional<ChunkId> chunk;  ///< whose bytes or room are wanted; nothing where it is room for the program

  bool operator==(const Wait&) const = default;
};

/// Give up the room of a chunk on a tier; carried out at once, then reported by `Policy::vacated`.
struct Vacate {
  ChunkId chunk = 0;
  Tier tier = Tier::device;
};

class Policy {
 public:
  /// `budgets` outlive the policy. `device_chunk_limit` bounds the bytes of chunks on the device, within
  /// its budget, but for activations, which are the program's by then; `prefetch_depth` the transfers ahead of need
  /// under way at once on a lane. When so many write-backs of a chunk in a row have failed as `write_attempts`, nothing
  /// more is promised.
  Policy(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit, std::size_t prefetch_depth = 0,
         std::uint32_t write_attempts = 2);
  /// Gives all room back to the budgets; by then the memory behind it is free.
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  // --- events ---

  /// Registers a chunk and takes its room at home, if that is free. Throws OutOfMemory, saying who holds what.
  ChunkId add_chunk(const ChunkInfo& info);
  /// Grants, queues or refuses `request`.
  void submit(Request& request);
  /// Grants a request of these accesses where that is possible at once, as most are. False, and nothing else, where it
  /// has to be submitted.
  bool try_grant(std::span<const ChunkAccess> accesses, bool in_schedule);
  /// Ends the pins of a granted request, given its accesses.
  void release(std::span<const ChunkAccess> accesses);
  void transfer_done(const Transfer& transfer);
  void transfer_failed(const Transfer& transfer, std::exception_ptr error);
  void vacated(const Vacate& vacate);
  /// The chunk's bytes are dead: its copies are dropped without a transfer as soon as nobody uses them.
  /// A write that comes first takes the word back.
  void discard(ChunkId chunk);
  /// The chunk is no more: as soon as nobody uses it, its room is given up on every tier, at home too. Nobody may ask
  /// for it again, unless its id is given to another, once it is gone.
  void remove(ChunkId chunk);
  /// The program has made the chunk's bytes, which nothing holds yet, in memory that is counted as its own: its copy on
  /// the device is that memory from now on, and no transfer brings it. It is an activation.
  void adopt(ChunkId chunk, Kind counted_as);
  /// A pass of the program begins, or goes on: see ScheduleBook. Returns whether it begins.
  bool begin_pass(ScheduleBook::Key key, ScheduleBook::End end = ScheduleBook::End::step,
                  std::optional<ChunkId> first = std::nullopt);
  /// The pass that runs ends with a step.
  void expect_step() { book_.expect_step(); }
  /// The program's step ends: the next pass is taken to be like the one after such a step before.
  void step_mark();
  /// What will be wanted on the host, in this order; replaces what was announced before.
  void announce(std::vector<ChunkId> chunks);
  /// While an update of chunks is queued, they are not fetched ahead to the device: their bytes are about to change, or
  /// to be dead. Ends with the next write or discard too.
  void set_update_queued(std::span<const ChunkId> chunks, bool queued);
  /// The gradient's update is done: nothing waits for it any more, though it is not fetched ahead until it is written.
  void update_done(ChunkId gradient);
  /// Whether the chunk's bytes are to be read on the host once (see next_reading): as soon as they come there after the
  /// write that follows. Ends with that, and with a discard; and unless a reader has begun, where it is not wanted any
  /// more or somebody waits to write. Of a chunk that is no more nothing happens.
  void set_read_on_arrival(ChunkId chunk, bool wanted);
  /// Who was given the chunk to read has done so.
  void reading_done(ChunkId chunk);
  /// Whether somebody waits for what patient requests are for: as long as that is so there are none.
  void set_updates_awaited(bool awaited);
  /// From now on every request is refused with the first error that this is told.
  void fail(std::exception_ptr error);

  // --- actions ---

  /// Whether there are actions, or was a request given its verdict.
  bool has_decided() const noexcept {
    return was_served_ || !vacates_.empty() || !transfers_.empty() || !urgent_.empty();
  }
  std::optional<Vacate> next_vacate();
  std::optional<Transfer> next_transfer();
  /// A transfer issued before for which somebody waits now.
  std::optional<Transfer> next_urgent();
  bool has_readings() const noexcept { return !readings_.empty(); }
  /// A chunk whose copy on the host is to be read now.
  std::optional<ChunkId> next_reading();

  // --- what there is ---

  std::size_t chunk_count() const noexcept { return chunks_.size(); }
  const Residency& chunk(ChunkId id) const { return chunks_.at(id); }
  /// Whether the chunk was removed and nothing is left of it.
  bool is_gone(ChunkId id) const;
  const Forecast& forecast(Tier tier) const noexcept { return lanes_[index_of(tier)].forecast; }
  /// Transfers that were started because somebody waited for the bytes on the device.
  std::uint64_t demand_fetches() const noexcept { return demand_fetches_; }
  std::uint64_t chunk_bytes(Tier tier) const noexcept { return chunk_bytes_[index_of(tier)]; }
  std::uint64_t peak_chunk_bytes(Tier tier) const noexcept { return peak_chunk_bytes_[index_of(tier)]; }
  std::size_t waiting() const noexcept;
  /// Whether all of these accesses could be granted at once.
  bool can_grant(std::span<const ChunkAccess> accesses) const;
  /// Whether any request that had to wait was given its verdict since this was last asked.
  bool take_was_served() noexcept { return std::exchange(was_served_, false); }
  /// Why a request without a verdict waits now: for the first operand that is not there, or for room. One that has not
  /// come to its turn, and whose bytes are not on their way, waits for what the first of its lane waits for.
  Wait wait_of(const Request& request) const;
  /// What every request is refused with, or null.
  const std::exception_ptr& failure() const noexcept { return failure_; }

  /// Throws LogicError if anything that must always hold does not. For tests: linear in the chunks.
  void check_invariants() const;

 private:
  enum class Progress : std::uint8_t { done, blocked };
  enum class Room : std::uint8_t { there, coming, none };
  /// Bytes, and how many of them count against the limit of chunks on the device.
  struct Rooms {
    std::uint64_t bytes = 0;
    std::uint64_t limited = 0;

    Rooms& operator+=(const Rooms& other) {
      bytes += other.bytes;
      limited += other.limited;
      return *this;
    }
    bool operator==(const Rooms&) const = default;
  };

  /// Who wants something on one tier, and what is known to be wanted there next.
  struct Lane {
    std::deque<Request*> queue;
    bool short_of_room = false;  ///< somebody waits for room on its tier
    Forecast forecast;
    std::size_t planned = 0;     ///< up to here nothing is to be fetched ahead
    std::size_t ahead = 0;       ///< transfers ahead of need under way
    bool ahead_is_full = false;  ///< there is no room to fetch more ahead until something changes
  };

  static Tier lane_of(const Request& request) noexcept {
    return !request.accesses.empty() ? request.accesses.front().tier
           : request.new_chunk       ? request.new_chunk->home
                                     : request.program_tier;
  }
  std::exception_ptr removed_error(ChunkId id) const;
  /// Whether the access, one of `all` of a request, can be granted at once.
  inline bool is_grantable(const ChunkAccess& access, std::span<const ChunkAccess> all) const;
  /// Where the transfer arrives that has to be done before the access can have its bytes; nothing if none is under way.
  std::optional<Tier> arrival_awaited(const ChunkAccess& access) const;
  void grant(Request& request);
  /// The access, which is pinned, begins.
  inline void begin_access(const ChunkAccess& access, bool in_schedule);
  /// Its lane's forecast goes on to it.
  void follow(const ChunkAccess& access);
  void refuse(Request& request, std::exception_ptr error);
  /// Serves who waits, then looks ahead.
  void advance();
  void serve(Lane& lane);
  Progress advance_room(Request& request);
  Progress advance_accesses(Request& request);
  /// Whether the access holds its pin with the bytes there; starts what is missing.
  bool advance_access(Request& request, std::size_t position);
  /// Room on the tier of the access at `position` that the accesses after it need and do not hold.
  std::uint64_t room_wanted_after(const Request& request, std::size_t position) const;
  void hold(Request& request, std::size_t position);
  void start_arrival(ChunkId id, Tier to, TransferPriority priority);
  /// Where to bring the chunk from; nothing where it has no bytes yet.
  std::optional<Tier> source_for(ChunkId id, Tier to) const;
  void start_transfer(const Transfer& transfer);
  void start_reading(ChunkId id);
  void forget_reading(ChunkId id);
  /// It was given out and nobody has begun: ends it.
  void withdraw_reading(ChunkId id);
  /// Nobody reads it on the host any more.
  void end_reading(ChunkId id);
  /// The copy is read now, if it is to be, and leaves the host if that was only on its way.
  void arrived_on_host(ChunkId id);
  /// It leaves the host, if it was only on its way.
  void end_passing(ChunkId id);
  /// A copy that was to leave once nobody reads it any more does so.
  void leave_if_unread(ChunkId id, Tier tier);
  /// Whether something on its way may leave room on the tier, so that one can wait for it.
  bool may_become_free(Tier tier) const noexcept {
    return in_flight_ > 0 || under_reading_ > 0 || vacating_bytes_[index_of(tier)] > 0;
  }
  inline void pin(const ChunkAccess& access);
  inline void unpin(const ChunkAccess& access);
  void supersede_others(ChunkId id, Tier tier);

  /// Takes the room that a request without accesses is for, if it is free.
  bool try_take_room(Request& request);
  bool try_take_room(ChunkId id, Tier tier);
  /// Room that is counted in the tier's budget becomes the chunk's.
  void take_counted_room(ChunkId id, Tier tier);
  std::optional<ChunkId> try_add_chunk(const ChunkInfo& info, std::optional<ChunkId> in_place_of = std::nullopt);
  // These return false where something that can be done ahead may be left.
  bool look_ahead(Tier tier);
  /// Fills chunks on the device that begin without bytes soon.
  bool fill_ahead();
  /// Whether the chunk that the program uses there in the device's forecast begins without bytes by that, its next use,
  /// and can do so now.
  bool is_to_be_filled(std::size_t position) const;
  /// Up to that position of the tier's forecast; false where something stands in the way.
  bool look_ahead_until(std::size_t end, Tier tier);
  /// Brings to the host what only NVMe holds and the device will read in this pass, if its copy there can stay until
  /// the use after that one; what could not comes to the device directly. False where something stands in the way.
  bool look_ahead_for_device();
  /// Brings the chunk that is used at `position` of the tier's forecast, at that distance. False where there is no
  /// room.
  bool fetch_ahead(ChunkId id, Tier tier, std::size_t position, std::uint64_t distance,
                   TransferPriority priority = TransferPriority::prefetch);
  void look_ahead_again(Tier tier);
  /// The pass that runs may be another than the device's forecast follows, or have begun anew. Then there may be
  /// something to do ahead.
  void follow_pass();
  /// The chunk's copy on the tier goes, or can be brought now: plans anew from its next use on.
  void plan_again(ChunkId id, Tier tier);
  /// Whether the chunk is on its way from NVMe to the host, from where the device is to have it.
  bool comes_by_host(ChunkId id) const;
  /// Whether the chunk on the tier is what is announced there at that position.
  bool is_announced_at(ChunkId id, Tier tier, std::size_t position) const;
  /// Room free of what the program will need until `position`. Evicts copies with a use beyond `distance`; on the host
  /// none where those are too few, for they would be brought again into the room that they leave, nor, where it is for
  /// what is `announced` there, if dying gradients leave enough for it and all after it.
  Room make_room_ahead(const Rooms& rooms, Tier tier, std::size_t position, std::uint64_t distance,
                       bool announced = false);
  /// Whether gradients on the host, when they die of updates before the one at `position`, leave room for `bytes` and
  /// for all that is announced after it.
  bool will_fit_as_gradients_die(std::uint64_t bytes, std::size_t position) const;
  /// What is planned next cannot come yet: has room made for it and some of what follows.
  void free_more_ahead(Tier tier, std::size_t end);
  /// Whether nothing stands in the way of bringing the chunk to the tier, and it is not there or on its way.
  bool can_come_ahead(ChunkId id, Tier tier) const;
  /// And it has bytes to bring.
  bool wanted_ahead(ChunkId id, Tier tier) const;
  /// Whether what stands there in the tier's forecast, around its end into the next, is. Of the next update nothing is
  /// that the device is about to change before.
  bool wanted_at(std::size_t position, Tier tier) const;
  /// What will take room before `position` and nothing brings ahead yet: chunks that begin without bytes, wait for
  /// their update, or are on their way to the host first; for the next update, what the device makes or changes before.
  Rooms room_wanted_before(std::size_t position, Tier tier) const;
  void evict(ChunkId id, Tier tier, TransferPriority priority);
  /// Whether the copy on the device is the only one, and the program has no further use of it in this pass, or it is an
  /// activation's that is expected to leave.
  bool is_done_with(ChunkId id) const;
  /// Has such a copy leave a second one, so that its room can be given up at once when it is wanted: at home, or where
  /// that is NVMe on the host, if there is room that nothing sooner needs. Or has it wait for its update.
  void clean_if_done_with(ChunkId id);
  void clean_by_host();
  /// Room on the host that other copies are to leave free, so that what is to be read there passes.
  std::uint64_t room_kept_to_read() const noexcept;
  /// Whether there will be room on the host for such a chunk, which another copy leaves if nothing else does.
  bool has_room_made_to_read(ChunkId id);
  /// Whether the chunk is to go to NVMe by the host, to be read there.
  bool is_to_pass_host(ChunkId id) const noexcept {
    return chunks_[id].info().home == Tier::nvme && chunks_[id].is_to_be_read();
  }
  /// What is on its way to leave room on the host.
  std::uint64_t coming_free_on_host() const noexcept {
    const std::size_t host = index_of(Tier::host);
    return passing_bytes_ + leaving_bytes_[host] + vacating_bytes_[host];
  }
  /// Room on the host for a chunk that leaves the device and rests on NVMe, free or that of copies which are used
  /// later; none where it is planned otherwise.
  Room room_to_stay_on_host(ChunkId id);
  /// Whether the chunk was on its way to the host only to leave it again; it is not any more.
  bool stop_passing(ChunkId id);
  /// Room that is free or on its way to be.
  Room room_now(std::uint64_t bytes, Tier tier) const;
  void send_home(ChunkId id);
  /// How far away the next use of the copy is, in units that can be compared on its tier: entries of its forecast; on
  /// the host entries of the device's, where that is known, for the device is brought its bytes from there, and an
  /// update is due when the device uses the parameters.
  std::uint64_t distance_of(ChunkId id, Tier tier) const;
  /// How far away that position of the tier's forecast is, in the same.
  std::uint64_t distance_of_position(std::size_t position, Tier tier) const;
  /// How far away the next time is that the copy's bytes are made anew: on the device by the program, on the host by an
  /// update.
  std::uint64_t distance_of_write(ChunkId id, Tier tier) const;
  /// Where the chunk is next in what is announced, around its end. What still waits for its update, while some after it
  /// had theirs, is where it was.
  std::optional<std::size_t> next_announced(ChunkId id) const;
  /// Finds by when what is announced is due.
  void time_updates();
  /// Finds which gradients are to wait on the device for their update, if it goes like the last.
  void plan_waiting();
  /// Finds which of the chunks that leave the device for long, and come back in the same pass, do so straight to NVMe:
  /// those between the ones that are spread evenly over the pass and have the host's room meanwhile.
  void plan_leaving();
  /// By chunk, of those at home on NVMe that are updated: the most bytes of accesses between two uses of the pass, when
  /// it has been written.
  std::vector<std::uint64_t> bytes_while_away(const Schedule& schedule) const;
  /// By chunk: whether that is more than the device has room for, so that it has to leave, and not much less than for
  /// most that have to: more than half of their median.
  std::vector<bool> is_away_for_long(const Schedule& schedule) const;
  /// What chunks that do not rest on the tier could take there beside the program, if that takes so much.
  std::uint64_t room_of_guests(Tier tier, std::uint64_t program_peak) const;
  /// Throws LogicError unless what `is_settled_` says is true.
  void check_settled() const;
  /// Starts evictions until `bytes` are free or on their way to be. False if there is nothing to wait for.
  bool make_room(Tier tier, const Rooms& rooms);
  /// Starts evictions until the host has room for the chunk, of copies that are used later than it; none where those
  /// are too few, for they would be brought again into the room that they leave.
  void make_room_patiently(ChunkId id);
  /// Whether the request rather waits than takes the room of what is used sooner.
  bool is_patient(const Request& request) const;
  /// The request waits for room that is on its way to be free.
  void wait_for_room(Request& request, Tier tier);
  /// What is missing in the budget, and what within the limit of chunks on the device.
  Rooms shortage(Tier tier, const Rooms& wanted) const;
  /// What the chunk takes there.
  static Rooms rooms_of(const ChunkInfo& info, Tier tier);
  /// A copy begins to leave, or does not leave any more.
  void count_leaving(const ChunkInfo& info, Tier tier);
  void count_not_leaving(const ChunkInfo& info, Tier tier);
  /// The copy that spares the fewest transfers for each entry for which it stays, of those with a next use beyond
  /// `distance`, where that is given, and of those that count against the limit of chunks, if `limited`.
  std::optional<ChunkId> victim(Tier tier, std::optional<std::uint64_t> distance, bool limited) const;
  /// What the copies take that are written home and can be dropped then, and have a next use beyond `distance`.
  std::uint64_t being_cleaned(Tier tier, std::uint64_t distance) const;
  /// Whether the program is done with the copy on the device in this pass, and at its end an update makes the chunk's
  /// bytes anew, if it goes like the last: so that the copy spares nothing by staying.
  bool is_made_anew_before_use(ChunkId id, Tier tier) const;
  /// Of an activation, as far as is known: it is not wanted again, and dies with what has read it.
  bool was_read_in_pass(ChunkId id) const;
  /// What the copies on the host take that can be evicted now and have a next use beyond `distance`.
  std::uint64_t could_leave_host(std::uint64_t distance) const;
  /// Whether the copy can be evicted now.
  bool can_leave(ChunkId id, Tier tier) const;
  void vacate(ChunkId id, Tier tier);
  void drop_if_dead(ChunkId id);

  /// Who lacks how much, for the message.
  struct Lack {
    Tier tier;
    std::uint64_t bytes;
    std::string what;
    bool is_limited = false;          ///< it counts against the limit of chunks on the device
    std::uint64_t further_bytes = 0;  ///< what the same request needs besides
    bool evicts = true;               ///< whether all that can leave was made to
  };
  std::exception_ptr out_of_memory(const Lack& lack) const;

  std::array<Budget*, tier_count> budgets_;
  std::uint64_t device_chunk_limit_;
  std::vector<Residency> chunks_;
  std::array<std::vector<ChunkId>, tier_count> guests_;  ///< chunks with a copy on a tier that is not their home
  std::array<Lane, tier_count> lanes_;
  std::deque<Vacate> vacates_;
  std::deque<Transfer> transfers_;
  std::deque<Transfer> urgent_;
  std::deque<ChunkId> readings_;
  bool activations_leave_ = false;  ///< one had to
  std::deque<ChunkId> done_with_;   ///< chunks at home on NVMe, of which the device has had its last use in this pass
  std::array<std::uint64_t, tier_count> chunk_bytes_{};  ///< chunks' share of each budget
  std::array<std::uint64_t, tier_count> peak_chunk_bytes_{};
  std::array<std::uint64_t, tier_count> vacating_bytes_{};  ///< issued as Vacate, not yet reported
  std::array<std::uint64_t, tier_count> leaving_bytes_{};   ///< to be vacated when their write-back is done
  std::uint64_t limited_bytes_ = 0;   ///< on the device, of what counts against the limit of chunks
  std::uint64_t limited_coming_ = 0;  ///< of those, what is being vacated or leaves
  std::uint64_t passing_bytes_ = 0;   ///< on their way to the host only to leave it again
  std::array<std::uint64_t, tier_count> sending_bytes_{};  ///< of transfers in flight, by the tier they read
  std::uint64_t in_flight_ = 0;                            ///< transfers issued, not yet reported
  std::uint64_t unread_ = 0;                               ///< chunks at home on NVMe that are to be read on arrival
  std::uint64_t unread_room_ = 0;                          ///< what the largest of them takes on the host
  std::uint64_t under_reading_ = 0;                        ///< chunks that are read, or given out for that
  std::uint64_t clock_ = 0;                                ///< logical time of uses
  std::exception_ptr failure_;
  const std::size_t prefetch_depth_;
  const std::uint32_t write_attempts_;
  std::size_t planned_for_device_ = 0;  ///< up to here of the device's forecast nothing is to be brought to the host
  std::uint64_t demand_fetches_ = 0;
  ScheduleBook book_;
  Schedule announced_;
  /// By announced entry, when the device uses the parameters that are updated with it or after it, counted from the
  /// beginning of its pass, and around its end: in their order, so that room is made for what comes first. None if
  /// unknown.
  std::vector<std::size_t> due_;
  std::vector<ChunkId> may_wait_;  ///< on the device for their update, once the program is done with them in this pass
  std::vector<ChunkId> straight_to_nvme_;  ///< where they go between their uses in this pass; in order of id
  bool updates_awaited_ = false;
  bool was_served_ = false;  ///< see take_was_served
  /// Nobody waits, all that can be done ahead is under way, and nothing that `advance` looks at has changed since: it
  /// would do nothing. Most ops come and go while this is so.
  bool is_settled_ = false;
};

}  // namespace terrace
