// Events in, actions out.
#include "memory/policy.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace terrace {
namespace {

bool is_ahead_of_need(const Transfer& transfer) {
  return transfer.priority == TransferPriority::prefetch || transfer.priority == TransferPriority::early;
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

template <class Action>
std::optional<Action> take_first(std::deque<Action>& actions) {
  if (actions.empty()) return std::nullopt;
  Action first = std::move(actions.front());
  actions.pop_front();
  return first;
}

}  // namespace

Policy::Policy(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit, std::size_t prefetch_depth,
               std::uint32_t write_attempts)
    : budgets_(budgets),
      device_chunk_limit_(device_chunk_limit),
      prefetch_depth_(prefetch_depth),
      write_attempts_(write_attempts) {}

Policy::~Policy() {
  const auto give_back = [&](ChunkId id, Tier tier) {
    const ChunkInfo& info = chunks_[id].info();
    if (tier == info.home) {
      budgets_[index_of(tier)]->let_go(info.room_bytes[index_of(tier)]);
    }
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
  if (const auto id = try_add_chunk(info)) {
    return *id;
  }
  std::rethrow_exception(out_of_memory({.tier = info.home,
                                        .bytes = info.room_bytes[index_of(info.home)],
                                        .what = describe(info) + " to rest there",
                                        .is_limited = rooms_of(info, info.home).limited > 0,
                                        .evicts = false}));
}

void Policy::submit(Request& request) {
  request.verdict = Request::Verdict::waiting;
  request.held.clear();
  const auto unknown = std::find_if(request.accesses.begin(), request.accesses.end(),
                                    [&](const ChunkAccess& access) { return access.chunk >= chunks_.size(); });
  const auto removed = std::find_if(request.accesses.begin(), unknown,
                                    [&](const ChunkAccess& access) { return chunks_[access.chunk].removed; });
  if (failure_) {
    refuse(request, failure_);
  } else if (unknown != request.accesses.end()) {
    refuse(request,
           std::make_exception_ptr(LogicError("policy: chunk " + std::to_string(unknown->chunk) + " is wanted, of " +
                                              std::to_string(chunks_.size()) + " that are registered")));
  } else if (removed != request.accesses.end()) {
    refuse(request, removed_error(removed->chunk));
  } else if (try_grant(request.accesses, request.in_schedule)) {
    request.verdict = Request::Verdict::granted;
  } else if (request.accesses.empty() && try_take_room(request)) {
    request.verdict = Request::Verdict::granted;
    advance();
  } else {
    for (const ChunkAccess& access : request.accesses) {
      if (access.mode == Access::write) {
        withdraw_reading(access.chunk);
      }
    }
    lanes_[index_of(lane_of(request))].queue.push_back(&request);
    advance();
  }
}

void Policy::transfer_done(const Transfer& transfer) {
  Residency& chunk = chunks_.at(transfer.chunk);
  chunk.step(transfer.to, CopyStep::arrived);
  chunk.at(transfer.to).last_use = ++clock_;
  chunk.at(transfer.to).failed_writes = 0;
  --in_flight_;
  chunk.blank = chunk.blank || transfer.fill;
  if (is_ahead_of_need(transfer)) {
    --lanes_[index_of(transfer.to)].ahead;
  }
  if (!transfer.fill) {
    --chunk.at(transfer.from).outgoing;
    sending_bytes_[index_of(transfer.from)] -= chunk.info().bytes;
    leave_if_unread(transfer.chunk, transfer.from);
  }
  lanes_[index_of(transfer.from)].ahead_is_full = false;
  lanes_[index_of(transfer.to)].ahead_is_full = false;
  if (transfer.to == Tier::host) {
    plan_again(transfer.chunk, Tier::device);
  }
  drop_if_dead(transfer.chunk);
  if (transfer.to == Tier::host) {
    arrived_on_host(transfer.chunk);
  }
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
  stop_passing(transfer.chunk);
  chunk.at(transfer.to).can_wait = false;
  --in_flight_;
  if (is_ahead_of_need(transfer)) {
    --lanes_[index_of(transfer.to)].ahead;
  }
  if (transfer.to != chunk.info().home) {
    vacate(transfer.chunk, transfer.to);
  }
  if (transfer.to == Tier::host) {
    // The device may have it from NVMe. To bring it here is not tried again at once.
    Lane& device = lanes_[index_of(Tier::device)];
    device.planned = std::min(device.planned, device.forecast.next_use(transfer.chunk).value_or(device.planned));
  }
  if (!transfer.fill) {
    Residency::Copy& source = chunk.at(transfer.from);
    --source.outgoing;
    sending_bytes_[index_of(transfer.from)] -= chunk.info().bytes;
    if (source.state == CopyState::leaving) {
      count_not_leaving(chunk.info(), transfer.from);
      chunk.step(transfer.from, CopyStep::stay);
    }
  }
  if (!transfer.fill && transfer.to == chunk.info().home && ++chunk.at(transfer.to).failed_writes >= write_attempts_) {
    fail(error);
  }
  drop_if_dead(transfer.chunk);
  advance();
}

void Policy::vacated(const Vacate& vacate) {
  const ChunkInfo& info = chunks_.at(vacate.chunk).info();
  const std::size_t tier = index_of(vacate.tier);
  if (vacate.tier == info.home) {
    budgets_[tier]->let_go(info.room_bytes[tier]);
  }
  budgets_[tier]->release(info.kind, info.room_bytes[tier]);
  chunk_bytes_[tier] -= info.room_bytes[tier];
  vacating_bytes_[tier] -= info.room_bytes[tier];
  limited_bytes_ -= rooms_of(info, vacate.tier).limited;
  limited_coming_ -= rooms_of(info, vacate.tier).limited;
  lanes_[tier].ahead_is_full = false;
  advance();
}

void Policy::discard(ChunkId chunk) {
  chunks_.at(chunk).discard_when_idle = true;
  chunks_.at(chunk).update = Residency::Update::none;
  forget_reading(chunk);
  drop_if_dead(chunk);
  advance();
}

void Policy::remove(ChunkId id) {
  Residency& chunk = chunks_.at(id);
  chunk.removed = true;
  for (Lane& lane : lanes_) {
    std::erase_if(lane.queue, [&](Request* request) {
      const bool wants = std::any_of(request->accesses.begin(), request->accesses.end(),
                                     [&](const ChunkAccess& access) { return access.chunk == id; });
      if (wants) {
        refuse(*request, removed_error(id));
      }
      return wants;
    });
  }
  discard(id);
}

void Policy::adopt(ChunkId id, Kind counted_as) {
  Residency& chunk = chunks_.at(id);
  if (chunk.info().kind != Kind::activation || chunk.has_bytes() || chunk.in_flight() || chunk.pinned() ||
      chunk.removed || chunk.info().home == Tier::device) {
    throw LogicError("policy: " + describe(chunk.info()) + " is to have bytes that it has already, or cannot have");
  }
  budgets_[index_of(Tier::device)]->recount(counted_as, chunk.info().kind,
                                            chunk.info().room_bytes[index_of(Tier::device)]);
  take_counted_room(id, Tier::device);
  chunk.step(Tier::device, CopyStep::arrive);
  chunk.step(Tier::device, CopyStep::arrived);
  chunk.at(Tier::device).last_use = ++clock_;
  clean_if_done_with(id);
  advance();
}

std::exception_ptr Policy::removed_error(ChunkId id) const {
  return std::make_exception_ptr(LogicError(describe(chunks_[id].info()) + " is wanted and has been removed"));
}

bool Policy::begin_pass(ScheduleBook::Key key, ScheduleBook::End end, std::optional<ChunkId> first) {
  const bool begins = book_.begin_pass(key, end, first);
  if (book_.current() != lanes_[index_of(Tier::device)].forecast.schedule()) {
    follow_pass();
    advance();
  }
  return begins;
}

void Policy::step_mark() {
  book_.end_step();
  follow_pass();
  advance();
}

void Policy::follow_pass() {
  lanes_[index_of(Tier::device)].forecast.follow(book_.current());
  time_updates();
  plan_waiting();
  plan_leaving();
  look_ahead_again(Tier::device);
  is_settled_ = false;
}

void Policy::fail(std::exception_ptr error) {
  if (!failure_) {
    failure_ = std::move(error);
  }
  for (Lane& lane : lanes_) {
    while (!lane.queue.empty()) {
      Request& first = *lane.queue.front();
      lane.queue.pop_front();
      refuse(first, failure_);
    }
  }
}

std::optional<Vacate> Policy::next_vacate() { return take_first(vacates_); }
std::optional<Transfer> Policy::next_transfer() { return take_first(transfers_); }
std::optional<Transfer> Policy::next_urgent() { return take_first(urgent_); }
std::optional<ChunkId> Policy::next_reading() { return take_first(readings_); }

void Policy::start_arrival(ChunkId id, Tier to, TransferPriority priority) {
  const std::optional<Tier> from = source_for(id, to);
  start_transfer({.chunk = id, .fill = !from, .from = from.value_or(to), .to = to, .priority = priority});
}

std::optional<Tier> Policy::source_for(ChunkId id, Tier to) const {
  const auto readable = [&](Tier tier) { return tier != to && chunks_[id].at(tier).readable(); };
  if (readable(Tier::host)) {
    return Tier::host;  // next to both others
  }
  if (readable(Tier::device) && readable(Tier::nvme)) {
    // From either side of the host: by the link that has less to do.
    return sending_bytes_[index_of(Tier::device)] <= sending_bytes_[index_of(Tier::nvme)] ? Tier::device : Tier::nvme;
  }
  return readable(Tier::device) ? std::optional(Tier::device)
         : readable(Tier::nvme) ? std::optional(Tier::nvme)
                                : std::nullopt;
}

void Policy::start_transfer(const Transfer& transfer) {
  Residency& chunk = chunks_[transfer.chunk];
  chunk.step(transfer.to, CopyStep::arrive);
  chunk.at(transfer.to).source = transfer.from;
  chunk.at(transfer.to).can_wait = transfer.priority != TransferPriority::demand;
  if (!transfer.fill) {
    ++chunk.at(transfer.from).outgoing;
    sending_bytes_[index_of(transfer.from)] += chunk.info().bytes;
  }
  ++in_flight_;
  is_settled_ = false;
  transfers_.push_back(transfer);
}

bool Policy::stop_passing(ChunkId id) {
  const bool passed = std::exchange(chunks_[id].passes_host, false);
  passing_bytes_ -= passed ? chunks_[id].info().room_bytes[index_of(Tier::host)] : 0;
  return passed;
}

void Policy::supersede_others(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  chunk.discard_when_idle = chunk.removed;
  chunk.update = Residency::Update::none;
  chunk.waits_for_update = false;
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

void Policy::drop_if_dead(ChunkId id) {
  Residency& chunk = chunks_[id];
  if (!chunk.discard_when_idle || chunk.in_flight() || chunk.pinned()) {
    return;
  }
  chunk.discard_when_idle = false;
  is_settled_ = false;
  for (const Tier tier : all_tiers) {
    const CopyState state = chunk.at(tier).state;
    if (chunk.removed ? state != CopyState::absent : state == CopyState::valid && tier != chunk.info().home) {
      vacate(id, tier);
    } else if (state == CopyState::valid) {
      chunk.step(tier, CopyStep::supersede);
    }
  }
}

}  // namespace terrace
