#include "memory/policy.h"

#include <algorithm>

#include "base/error.h"
#include "base/units.h"

namespace terrace {
namespace {

/// Write-backs of one chunk that may fail in a row before nothing more is promised.
constexpr std::uint32_t write_attempts = 2;

/// Tiers to read a chunk from, nearest to the destination first.
std::array<Tier, 2> sources_for(Tier to) {
  switch (to) {
    case Tier::device:
      return {Tier::host, Tier::nvme};
    case Tier::host:
      return {Tier::device, Tier::nvme};
    case Tier::nvme:
      break;
  }
  return {Tier::host, Tier::device};
}

/// Whether the request holds a pin on the copy that the transfer was to bring.
bool waits_for(const Request& request, const Transfer& transfer) {
  for (std::size_t i = 0; i < request.held.size(); ++i) {
    if (request.held[i] && request.accesses[i].chunk == transfer.chunk && request.accesses[i].tier == transfer.to) {
      return true;
    }
  }
  return false;
}

std::string describe(const ChunkInfo& info) {
  return std::string(name_of(info.kind)) + " chunk " + std::to_string(info.index);
}

}  // namespace

Policy::Policy(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit, std::size_t prefetch_depth)
    : budgets_(budgets), device_chunk_limit_(device_chunk_limit), prefetch_depth_(prefetch_depth) {}

Policy::~Policy() {
  const auto give_back = [&](ChunkId id, Tier tier) {
    const ChunkInfo& info = chunks_[id].info();
    budgets_[index_of(tier)]->release(info.kind, info.room_bytes[index_of(tier)]);
  };
  for (ChunkId id = 0; id < chunks_.size(); ++id) {
    for (const Tier tier : all_tiers) {
      if (chunks_[id].at(tier).state != CopyState::absent) {
        give_back(id, tier);
      }
    }
  }
  for (const Vacate& vacate : vacates_) {
    give_back(vacate.chunk, vacate.tier);
  }
}

ChunkId Policy::add_chunk(const ChunkInfo& info) {
  const auto id = static_cast<ChunkId>(chunks_.size());
  chunks_.emplace_back(info);
  if (!try_take_room(id, info.home)) {
    chunks_.pop_back();
    std::rethrow_exception(out_of_memory({.tier = info.home,
                                          .bytes = info.room_bytes[index_of(info.home)],
                                          .what = describe(info) + " to rest there",
                                          .for_chunk = true,
                                          .evicts = false}));
  }
  return id;
}

void Policy::submit(Request& request) {
  request.verdict = Request::Verdict::waiting;
  request.held.clear();
  const auto unknown = std::find_if(request.accesses.begin(), request.accesses.end(),
                                    [&](const Access& access) { return access.chunk >= chunks_.size(); });
  if (failure_) {
    refuse(request, failure_);
  } else if (unknown != request.accesses.end()) {
    refuse(request,
           std::make_exception_ptr(LogicError("policy: chunk " + std::to_string(unknown->chunk) + " is wanted, of " +
                                              std::to_string(chunks_.size()) + " that are registered")));
  } else if (request.accesses.empty()
                 ? budgets_[index_of(request.program_tier)]->try_reserve(request.program_kind, request.program_bytes)
                 : grantable_now(request)) {
    grant(request);
    advance();
  } else {
    lanes_[index_of(lane_of(request))].queue.push_back(&request);
    advance();
  }
}

void Policy::release(std::span<const Access> accesses) {
  for (const Access& access : accesses) {
    unpin(access);
  }
  advance();
}

void Policy::transfer_done(const Transfer& transfer) {
  Residency& chunk = chunks_.at(transfer.chunk);
  chunk.step(transfer.to, CopyStep::arrived);
  chunk.at(transfer.to).last_use = ++clock_;
  chunk.at(transfer.to).failed_writes = 0;
  --in_flight_;
  if (transfer.priority == TransferPriority::prefetch) {
    --lanes_[index_of(transfer.to)].ahead;
  }
  if (!transfer.fill) {
    Residency::Copy& source = chunk.at(transfer.from);
    --source.outgoing;
    if (source.state == CopyState::leaving && source.outgoing == 0) {
      leaving_bytes_[index_of(transfer.from)] -= chunk.info().room_bytes[index_of(transfer.from)];
      vacate(transfer.chunk, transfer.from);
    }
  }
  drop_if_dead(transfer.chunk);
  advance();
}

void Policy::transfer_failed(const Transfer& transfer, std::exception_ptr error) {
  Residency& chunk = chunks_.at(transfer.chunk);
  if (chunk.at(transfer.to).state != CopyState::arriving) {
    throw LogicError("policy: a transfer that was not started is reported failed");
  }
  // Who waits for these bytes gets the error; only the first of a lane holds a pin on them.
  for (Lane& lane : lanes_) {
    if (!lane.queue.empty() && waits_for(*lane.queue.front(), transfer)) {
      Request& first = *lane.queue.front();
      lane.queue.pop_front();
      refuse(first, error);
    }
  }
  chunk.step(transfer.to, CopyStep::failed);
  chunk.at(transfer.to).ahead_of_need = false;
  --in_flight_;
  if (transfer.priority == TransferPriority::prefetch) {
    --lanes_[index_of(transfer.to)].ahead;
  }
  if (transfer.to != chunk.info().home) {
    vacate(transfer.chunk, transfer.to);
  }
  if (!transfer.fill) {
    Residency::Copy& source = chunk.at(transfer.from);
    --source.outgoing;
    if (source.state == CopyState::leaving) {
      leaving_bytes_[index_of(transfer.from)] -= chunk.info().room_bytes[index_of(transfer.from)];
      chunk.step(transfer.from, CopyStep::stay);
    }
  }
  if (!transfer.fill && transfer.to == chunk.info().home && ++chunk.at(transfer.to).failed_writes >= write_attempts) {
    fail(error);
  }
  drop_if_dead(transfer.chunk);
  advance();
}

void Policy::vacated(const Vacate& vacate) {
  const ChunkInfo& info = chunks_.at(vacate.chunk).info();
  const std::size_t tier = index_of(vacate.tier);
  budgets_[tier]->release(info.kind, info.room_bytes[tier]);
  chunk_bytes_[tier] -= info.room_bytes[tier];
  vacating_bytes_[tier] -= info.room_bytes[tier];
  advance();
}

void Policy::discard(ChunkId chunk) {
  chunks_.at(chunk).discard_when_idle = true;
  drop_if_dead(chunk);
  advance();
}

void Policy::begin_pass(ScheduleBook::Key key) {
  book_.begin_pass(key);
  if (book_.current() != lanes_[index_of(Tier::device)].forecast.schedule()) {
    lanes_[index_of(Tier::device)].forecast.follow(book_.current());
    look_ahead_again(Tier::device);
    advance();
  }
}

void Policy::step_mark() {
  book_.end_step();
  lanes_[index_of(Tier::device)].forecast.follow(book_.current());
  look_ahead_again(Tier::device);
  advance();
}

void Policy::announce(std::vector<ChunkId> chunks) {
  std::vector<Schedule::Entry> entries;
  entries.reserve(chunks.size());
  for (const ChunkId chunk : chunks) {
    entries.push_back({.chunk = chunk});
  }
  announced_ = Schedule(std::move(entries));
  lanes_[index_of(Tier::host)].forecast.follow(&announced_);
  look_ahead_again(Tier::host);
  advance();
}

void Policy::set_update_queued(ChunkId chunk, bool queued) {
  chunks_.at(chunk).update_queued = queued;
  if (!queued) {
    look_ahead_again(Tier::device);
    advance();
  }
}

void Policy::fail(std::exception_ptr error) {
  failure_ = std::move(error);
  for (Lane& lane : lanes_) {
    while (!lane.queue.empty()) {
      Request& first = *lane.queue.front();
      lane.queue.pop_front();
      refuse(first, failure_);
    }
  }
}

std::optional<Vacate> Policy::next_vacate() {
  if (vacates_.empty()) {
    return std::nullopt;
  }
  const Vacate next = vacates_.front();
  vacates_.pop_front();
  return next;
}

std::optional<Transfer> Policy::next_transfer() {
  if (transfers_.empty()) {
    return std::nullopt;
  }
  const Transfer next = transfers_.front();
  transfers_.pop_front();
  return next;
}

std::optional<Transfer> Policy::next_urgent() {
  if (urgent_.empty()) {
    return std::nullopt;
  }
  const Transfer next = urgent_.front();
  urgent_.pop_front();
  return next;
}

std::size_t Policy::waiting() const noexcept {
  std::size_t count = 0;
  for (const Lane& lane : lanes_) {
    count += lane.queue.size();
  }
  return count;
}

bool Policy::grantable_now(const Request& request) const {
  return std::all_of(request.accesses.begin(), request.accesses.end(), [&](const Access& access) {
    const Residency& chunk = chunks_[access.chunk];
    if (chunk.at(access.tier).state != CopyState::valid) {
      return false;
    }
    const auto conflicts = [&](const Access& other) {
      return other.chunk == access.chunk && other.tier != access.tier;
    };
    return access.mode == AccessMode::read ||
           (!chunk.in_flight() && !chunk.pinned_elsewhere(access.tier) &&
            std::none_of(request.accesses.begin(), request.accesses.end(), conflicts));
  });
}

void Policy::grant(Request& request) {
  Budget& device = *budgets_[index_of(Tier::device)];
  if (!request.accesses.empty()) {
    book_.note_program_bytes(device.take_program_peak());
  }
  for (std::size_t i = 0; i < request.accesses.size(); ++i) {
    const Access& access = request.accesses[i];
    if (request.held.empty() || !request.held[i]) {
      pin(access);
    }
    chunks_[access.chunk].at(access.tier).ahead_of_need = false;
    if (access.mode == AccessMode::write) {
      supersede_others(access.chunk, access.tier);
    }
    if (access.tier == Tier::device) {
      book_.record(access, device.used() - chunk_bytes_[index_of(Tier::device)]);
    }
    lanes_[index_of(access.tier)].forecast.advance(access.chunk);
  }
  request.verdict = Request::Verdict::granted;
}

void Policy::refuse(Request& request, std::exception_ptr error) {
  for (std::size_t i = 0; i < request.held.size(); ++i) {
    if (request.held[i]) {
      unpin(request.accesses[i]);
    }
  }
  request.held.clear();
  request.error = std::move(error);
  request.verdict = Request::Verdict::refused;
}

void Policy::advance() {
  for (Lane& lane : lanes_) {
    serve(lane);
  }
  if (prefetch_depth_ > 0 && !failure_) {
    look_ahead(Tier::device);
    look_ahead(Tier::host);
  }
}

void Policy::serve(Lane& lane) {
  while (!lane.queue.empty()) {
    Request& first = *lane.queue.front();
    lane.short_of_room = false;
    const Progress progress = first.accesses.empty() ? advance_program(first) : advance_accesses(first);
    if (progress == Progress::blocked) {
      return;
    }
    lane.queue.pop_front();
  }
}

Policy::Progress Policy::advance_program(Request& request) {
  const Tier tier = request.program_tier;
  while (!budgets_[index_of(tier)]->try_reserve(request.program_kind, request.program_bytes)) {
    if (!make_room(tier, request.program_bytes, false)) {
      const bool is_tensor = request.program_kind == Kind::activation || request.program_kind == Kind::buffer ||
                             request.program_kind == Kind::other;
      refuse(request, out_of_memory({.tier = tier,
                                     .bytes = request.program_bytes,
                                     .what = is_tensor ? "a tensor of the program"
                                                       : "a " + std::string(name_of(request.program_kind)) +
                                                             " chunk to rest there"}));
      return Progress::done;
    }
    if (in_flight_ > 0 || vacating_bytes_[index_of(tier)] > 0) {
      lanes_[index_of(tier)].short_of_room = true;
      return Progress::blocked;
    }
  }
  grant(request);
  return Progress::done;
}

Policy::Progress Policy::advance_accesses(Request& request) {
  request.held.resize(request.accesses.size(), false);
  // What is there already first, so that it is not evicted to make room for the rest.
  for (std::size_t i = 0; i < request.accesses.size(); ++i) {
    if (chunks_[request.accesses[i].chunk].at(request.accesses[i].tier).readable()) {
      hold(request, i);
    }
  }
  bool all_there = true;
  for (std::size_t i = 0; i < request.accesses.size(); ++i) {
    all_there = advance_access(request, i) && all_there;
    if (request.verdict != Request::Verdict::waiting) {
      return Progress::done;
    }
  }
  if (!all_there) {
    return Progress::blocked;
  }
  grant(request);
  return Progress::done;
}

bool Policy::advance_access(Request& request, std::size_t position) {
  const Access access = request.accesses[position];
  Residency& chunk = chunks_.at(access.chunk);
  const bool writes = access.mode == AccessMode::write;
  // Bytes that are being changed elsewhere cannot be copied, and pinned copies cannot be superseded; waiting
  // for whoever holds the pin could be waiting for oneself.
  if (writes ? chunk.pinned_elsewhere(access.tier) : chunk.changing_elsewhere(access.tier)) {
    refuse(request, std::make_exception_ptr(LogicError(
                        describe(chunk.info()) + " is wanted for " + (writes ? "writing" : "reading") + " on the " +
                        std::string(name_of(access.tier)) + " while it is held on another tier")));
    return false;
  }
  while (chunk.at(access.tier).state == CopyState::absent) {
    if (try_take_room(access.chunk, access.tier)) {
      break;
    }
    const std::uint64_t room = chunk.info().room_bytes[index_of(access.tier)];
    if (!make_room(access.tier, room, true)) {
      refuse(request, out_of_memory({.tier = access.tier,
                                     .bytes = room,
                                     .what = describe(chunk.info()),
                                     .for_chunk = true,
                                     .further_bytes = room_wanted_after(request, position)}));
      return false;
    }
    if (in_flight_ > 0 || vacating_bytes_[index_of(access.tier)] > 0) {
      lanes_[index_of(access.tier)].short_of_room = true;
      return false;
    }
  }
  hold(request, position);
  if (chunk.at(access.tier).state == CopyState::reserved) {
    demand_fetches_ += access.tier == Tier::device && chunk.has_bytes() ? 1 : 0;
    start_arrival(access.chunk, access.tier, TransferPriority::demand);
  } else if (chunk.at(access.tier).state == CopyState::arriving && chunk.at(access.tier).ahead_of_need) {
    chunk.at(access.tier).ahead_of_need = false;
    urgent_.push_back({.chunk = access.chunk, .to = access.tier});
  }
  if (chunk.at(access.tier).state != CopyState::valid) {
    return false;
  }
  return !writes || !chunk.in_flight();
}

std::uint64_t Policy::room_wanted_after(const Request& request, std::size_t position) const {
  const Tier tier = request.accesses[position].tier;
  std::vector<ChunkId> counted{request.accesses[position].chunk};
  std::uint64_t room = 0;
  for (const Access& access : request.accesses.subspan(position + 1)) {
    const Residency& chunk = chunks_[access.chunk];
    if (access.tier == tier && chunk.info().home != tier && chunk.at(tier).pins == 0 &&
        std::find(counted.begin(), counted.end(), access.chunk) == counted.end()) {
      room += chunk.info().room_bytes[index_of(tier)];
      counted.push_back(access.chunk);
    }
  }
  return room;
}

void Policy::hold(Request& request, std::size_t position) {
  if (!request.held[position]) {
    request.held[position] = true;
    pin(request.accesses[position]);
  }
}

void Policy::start_arrival(ChunkId id, Tier to, TransferPriority priority) {
  const Residency& chunk = chunks_[id];
  for (const Tier from : sources_for(to)) {
    if (chunk.at(from).readable()) {
      start_transfer({.chunk = id, .fill = false, .from = from, .to = to, .priority = priority});
      return;
    }
  }
  start_transfer({.chunk = id, .fill = true, .from = to, .to = to, .priority = priority});
}

void Policy::start_transfer(const Transfer& transfer) {
  Residency& chunk = chunks_[transfer.chunk];
  chunk.step(transfer.to, CopyStep::arrive);
  if (!transfer.fill) {
    ++chunk.at(transfer.from).outgoing;
  }
  ++in_flight_;
  transfers_.push_back(transfer);
}

void Policy::pin(const Access& access) {
  Residency& chunk = chunks_.at(access.chunk);
  Residency::Copy& copy = chunk.at(access.tier);
  if (copy.state == CopyState::leaving) {
    leaving_bytes_[index_of(access.tier)] -= chunk.info().room_bytes[index_of(access.tier)];
    chunk.step(access.tier, CopyStep::stay);
  }
  ++copy.pins;
  copy.write_pins += access.mode == AccessMode::write ? 1 : 0;
  copy.last_use = ++clock_;
}

void Policy::unpin(const Access& access) {
  Residency::Copy& copy = chunks_.at(access.chunk).at(access.tier);
  const std::uint32_t writes = access.mode == AccessMode::write ? 1 : 0;
  if (copy.pins == 0 || copy.write_pins < writes) {
    throw LogicError("policy: a pin is released that nobody holds");
  }
  --copy.pins;
  copy.write_pins -= writes;
  copy.last_use = ++clock_;
  drop_if_dead(access.chunk);
  clean_if_done_with(access.chunk, access.tier);
}

void Policy::supersede_others(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  chunk.discard_when_idle = false;
  for (const Tier other : all_tiers) {
    if (other != tier && chunk.at(other).state == CopyState::valid) {
      if (other == chunk.info().home) {
        chunk.step(other, CopyStep::supersede);
      } else {
        vacate(id, other);
      }
    }
  }
}

bool Policy::try_take_room(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  const std::size_t at = index_of(tier);
  const std::uint64_t room = chunk.info().room_bytes[at];
  if (tier == Tier::device && chunk_bytes_[at] + room > device_chunk_limit_) {
    return false;
  }
  if (!budgets_[at]->try_reserve(chunk.info().kind, room)) {
    return false;
  }
  chunk_bytes_[at] += room;
  peak_chunk_bytes_[at] = std::max(peak_chunk_bytes_[at], chunk_bytes_[at]);
  chunk.step(tier, CopyStep::reserve);
  return true;
}

bool Policy::make_room(Tier tier, std::uint64_t bytes, bool for_chunk) {
  while (shortage(tier, bytes, for_chunk) > 0) {
    const std::optional<ChunkId> id = victim(tier);
    if (!id) {
      return in_flight_ > 0 || vacating_bytes_[index_of(tier)] > 0;
    }
    evict(*id, tier, TransferPriority::demand);
  }
  return true;
}

void Policy::evict(ChunkId id, Tier tier, TransferPriority priority) {
  Residency& chunk = chunks_[id];
  Lane& lane = lanes_[index_of(tier)];
  if (const auto use = lane.forecast.schedule() != nullptr
                           ? lane.forecast.schedule()->next_use(id, lane.forecast.cursor())
                           : std::nullopt) {
    lane.planned = std::min(lane.planned, *use);
  }
  if (chunk.readable_elsewhere(tier)) {
    vacate(id, tier);
  } else {
    chunk.step(tier, CopyStep::leave);
    leaving_bytes_[index_of(tier)] += chunk.info().room_bytes[index_of(tier)];
    start_transfer({.chunk = id, .fill = false, .from = tier, .to = chunk.info().home, .priority = priority});
  }
}

void Policy::look_ahead(Tier tier) {
  Lane& lane = lanes_[index_of(tier)];
  const Schedule* schedule = lane.forecast.schedule();
  if (schedule == nullptr || lane.short_of_room) {
    return;
  }
  for (lane.planned = std::max(lane.planned, lane.forecast.cursor()); lane.planned < schedule->size(); ++lane.planned) {
    if (lane.ahead >= prefetch_depth_) {
      return;
    }
    const ChunkId id = (*schedule)[lane.planned].chunk;
    Residency& chunk = chunks_[id];
    const CopyState state = chunk.at(tier).state;
    const bool wanted_here = state == CopyState::absent || state == CopyState::reserved;
    if (!wanted_here || !chunk.has_bytes() || chunk.discard_when_idle || chunk.changing_elsewhere(tier) ||
        (tier == Tier::device && chunk.update_queued)) {
      continue;
    }
    if (state == CopyState::absent && !take_room_ahead(id, tier, lane.planned)) {
      return;
    }
    ++lane.ahead;
    chunk.at(tier).ahead_of_need = true;
    start_arrival(id, tier, TransferPriority::prefetch);
  }
}

bool Policy::take_room_ahead(ChunkId id, Tier tier, std::size_t position) {
  const std::size_t at = index_of(tier);
  const Forecast& forecast = lanes_[at].forecast;
  const std::uint64_t room = chunks_[id].info().room_bytes[at];
  const std::uint64_t used_by_others = budgets_[at]->used() - chunk_bytes_[at];
  const std::uint64_t others = std::max(used_by_others, forecast.schedule()->program_peak(forecast.cursor(), position));
  const auto fits = [&](std::uint64_t chunk_bytes) {
    return chunk_bytes + room + others <= budgets_[at]->capacity() &&
           (tier != Tier::device || chunk_bytes + room <= device_chunk_limit_);
  };
  for (;;) {
    if (fits(chunk_bytes_[at])) {
      return try_take_room(id, tier);
    }
    if (fits(chunk_bytes_[at] - vacating_bytes_[at] - leaving_bytes_[at])) {
      return false;  // it comes
    }
    const std::optional<ChunkId> other = victim(tier);
    if (!other || distance(*other, tier) <= position - forecast.cursor()) {
      return false;
    }
    evict(*other, tier, TransferPriority::write_back);
  }
}

void Policy::clean_if_done_with(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  const Residency::Copy& copy = chunk.at(tier);
  const Residency::Copy& home = chunk.at(chunk.info().home);
  const Forecast& forecast = lanes_[index_of(tier)].forecast;
  if (prefetch_depth_ > 0 && !failure_ && copy.state == CopyState::valid && copy.pins == 0 &&
      chunk.info().home != tier && home.state == CopyState::reserved && !chunk.readable_elsewhere(tier) &&
      home.failed_writes == 0 && !chunk.discard_when_idle && forecast.schedule() != nullptr &&
      !forecast.used_again(id)) {
    start_transfer(
        {.chunk = id, .fill = false, .from = tier, .to = chunk.info().home, .priority = TransferPriority::write_back});
  }
}

std::uint64_t Policy::distance(ChunkId id, Tier tier) const {
  const std::uint64_t here = lanes_[index_of(tier)].forecast.distance(id);
  if (tier != Tier::host || here != Forecast::never) {
    return here;
  }
  // Not announced, but the device may be brought its bytes from here: after all that is announced.
  const std::uint64_t on_device = lanes_[index_of(Tier::device)].forecast.distance(id);
  constexpr std::uint64_t after_what_is_announced = std::uint64_t{1} << 62;
  return on_device == Forecast::never ? Forecast::never : after_what_is_announced + on_device;
}

std::uint64_t Policy::shortage(Tier tier, std::uint64_t bytes, bool for_chunk) const {
  const std::size_t at = index_of(tier);
  const std::uint64_t coming = vacating_bytes_[at] + leaving_bytes_[at];
  const auto missing = [&](std::uint64_t used, std::uint64_t limit) {
    const std::uint64_t wanted = used + bytes;
    return wanted > limit + coming ? wanted - limit - coming : 0;
  };
  const std::uint64_t in_budget = missing(budgets_[at]->used(), budgets_[at]->capacity());
  const bool limited = for_chunk && tier == Tier::device;
  return limited ? std::max(in_budget, missing(chunk_bytes_[at], device_chunk_limit_)) : in_budget;
}

std::optional<ChunkId> Policy::victim(Tier tier) const {
  std::optional<ChunkId> found;
  std::uint64_t furthest = 0;
  bool found_clean = false;
  for (ChunkId id = 0; id < chunks_.size(); ++id) {
    const Residency& chunk = chunks_[id];
    const Residency::Copy& copy = chunk.at(tier);
    const bool clean = chunk.readable_elsewhere(tier);
    // Where the home is just being filled, its copy has to come first: nothing else can be brought there.
    const bool can_leave = clean || chunk.at(chunk.info().home).state != CopyState::arriving;
    if (copy.state != CopyState::valid || copy.pins > 0 || copy.outgoing > 0 || chunk.info().home == tier ||
        !can_leave) {
      continue;
    }
    const std::uint64_t away = distance(id, tier);
    const auto last_use = [&](ChunkId other) { return chunks_[other].at(tier).last_use; };
    const bool better =
        !found || away > furthest ||
        (away == furthest && (clean != found_clean && lanes_[index_of(tier)].forecast.schedule() != nullptr
                                  ? clean
                                  : last_use(id) < last_use(*found)));
    if (better) {
      found = id;
      furthest = away;
      found_clean = clean;
    }
  }
  return found;
}

void Policy::vacate(ChunkId id, Tier tier) {
  chunks_[id].step(tier, CopyStep::vacate);
  vacating_bytes_[index_of(tier)] += chunks_[id].info().room_bytes[index_of(tier)];
  vacates_.push_back({id, tier});
}

void Policy::drop_if_dead(ChunkId id) {
  Residency& chunk = chunks_[id];
  if (!chunk.discard_when_idle || chunk.in_flight() || chunk.pinned()) {
    return;
  }
  chunk.discard_when_idle = false;
  for (const Tier tier : all_tiers) {
    if (chunk.at(tier).state == CopyState::valid) {
      if (tier == chunk.info().home) {
        chunk.step(tier, CopyStep::supersede);
      } else {
        vacate(id, tier);
      }
    }
  }
}

std::exception_ptr Policy::out_of_memory(const Lack& lack) const {
  const Tier tier = lack.tier;
  const std::size_t at = index_of(tier);
  const Budget& budget = *budgets_[at];
  std::uint64_t evictable = 0;
  for (const Residency& chunk : chunks_) {
    if (lack.evicts && chunk.at(tier).state == CopyState::valid && chunk.at(tier).pins == 0 &&
        chunk.info().home != tier) {
      evictable += chunk.info().room_bytes[at];
    }
  }
  const std::uint64_t wanted = lack.bytes + lack.further_bytes;
  const std::string name(name_of(tier));
  std::string message =
      name + ": " + format_bytes(lack.bytes) + " for " + lack.what + " do not fit; " + budget.describe();
  const std::uint64_t held_chunks = chunk_bytes_[at] - std::min(evictable, chunk_bytes_[at]);
  if (lack.for_chunk && tier == Tier::device && held_chunks + wanted > device_chunk_limit_) {
    message +=
        "; chunks hold " + format_bytes(chunk_bytes_[at]) + " of device.chunks " + format_bytes(device_chunk_limit_);
    return std::make_exception_ptr(OutOfMemory(message,
                                               "raise device.chunks (with room for it in device.memory) to at "
                                               "least " +
                                                   format_bytes_exactly(held_chunks + wanted) +
                                                   ", or make chunks smaller by placement.chunk"));
  }
  const std::uint64_t held = budget.used() - std::min(evictable, budget.used());
  if (lack.evicts) {
    message += "; " + format_bytes(held) + " of it cannot leave now";
  }
  std::string hint = "raise " + name + ".memory to at least " + format_bytes_exactly(held + wanted);
  if (tier == Tier::device) {
    hint += ", lower the micro-batch, or build the model inside Session::construct if it was built outside";
  }
  return std::make_exception_ptr(OutOfMemory(message, hint));
}

void Policy::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) {
      throw LogicError(std::string("policy: broken invariant: ") + what);
    }
  };
  std::array<std::uint64_t, tier_count> rooms = vacating_bytes_;
  std::array<std::uint64_t, tier_count> leaving{};
  std::uint64_t arriving = 0;
  std::uint64_t outgoing = 0;
  for (const Residency& chunk : chunks_) {
    const ChunkInfo& info = chunk.info();
    require(chunk.at(info.home).state != CopyState::absent, "a chunk keeps its room at home");
    for (const Tier tier : all_tiers) {
      const Residency::Copy& copy = chunk.at(tier);
      const std::uint64_t room = info.room_bytes[index_of(tier)];
      rooms[index_of(tier)] += copy.state != CopyState::absent ? room : 0;
      leaving[index_of(tier)] += copy.state == CopyState::leaving ? room : 0;
      arriving += copy.state == CopyState::arriving ? 1 : 0;
      outgoing += copy.outgoing;
      require(copy.write_pins <= copy.pins, "a write pin is a pin");
      require(copy.pins == 0 || copy.state == CopyState::valid || copy.state == CopyState::arriving,
              "a pinned copy is there or arriving");
      require(copy.state != CopyState::leaving || copy.outgoing > 0, "a leaving copy is being written back");
      require(copy.state != CopyState::reserved || tier == info.home, "only a home keeps room without bytes");
      require(copy.outgoing == 0 || copy.readable(), "a transfer reads a copy that is there");
    }
  }
  require(arriving == in_flight_, "every transfer in flight arrives somewhere");
  require(outgoing <= in_flight_, "every copy being read is read by a transfer");
  require(leaving == leaving_bytes_, "leaving bytes are those of the leaving copies");
  for (const Tier tier : all_tiers) {
    const std::size_t at = index_of(tier);
    require(rooms[at] == chunk_bytes_[at], "chunk bytes are the rooms of the copies");
    require(budgets_[at]->used() >= chunk_bytes_[at], "chunk bytes are counted in the budget");
    require(budgets_[at]->used() <= budgets_[at]->capacity(), "no tier is over its budget");
  }
  require(chunk_bytes_[index_of(Tier::device)] <= device_chunk_limit_, "device chunks stay within their limit");
  const bool something_comes = in_flight_ > 0 || vacating_bytes_ != std::array<std::uint64_t, tier_count>{};
  require(waiting() == 0 || something_comes, "who waits, waits for something in flight");
  std::size_t ahead = 0;
  for (const Lane& lane : lanes_) {
    ahead += lane.ahead;
    for (std::size_t i = 1; i < lane.queue.size(); ++i) {
      require(lane.queue[i]->held.empty(), "only the first of a lane holds pins");
    }
    require(lane.ahead <= prefetch_depth_, "no more is fetched ahead at once than is allowed");
  }
  require(ahead <= in_flight_, "what is fetched ahead is in flight");
}

}  // namespace terrace
