// Requests: who waits for what, and who is granted it or refused.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "memory/policy.h"

namespace terrace {

std::size_t Policy::waiting() const noexcept {
  std::size_t count = 0;
  for (const Lane& lane : lanes_) {
    count += lane.queue.size();
  }
  return count;
}

// What each op comes by, mostly to find that all is there, is inline: it is called in this file alone.

bool Policy::is_grantable(const ChunkAccess& access, std::span<const ChunkAccess> all) const {
  if (access.chunk >= chunks_.size() || chunks_[access.chunk].removed) {
    return false;
  }
  const Residency& chunk = chunks_[access.chunk];
  if (chunk.at(access.tier).state != CopyState::valid) {
    return false;
  }
  const auto conflicts = [&](const ChunkAccess& other) {
    return other.chunk == access.chunk && other.tier != access.tier;
  };
  return access.mode == Access::read || (!chunk.in_flight() && !chunk.pinned_elsewhere(access.tier) &&
                                         std::none_of(all.begin(), all.end(), conflicts));
}

void Policy::pin(const ChunkAccess& access) {
  Residency& chunk = chunks_.at(access.chunk);
  Residency::Copy& copy = chunk.at(access.tier);
  if (copy.state == CopyState::leaving) {
    count_not_leaving(chunk.info(), access.tier);
    chunk.step(access.tier, CopyStep::stay);
  }
  if (copy.pins++ == 0 && access.tier != chunk.info().home) {
    budgets_[index_of(access.tier)]->hold(chunk.info().room_bytes[index_of(access.tier)]);
  }
  copy.write_pins += access.mode == Access::write ? 1 : 0;
  copy.last_use = ++clock_;
}

void Policy::begin_access(const ChunkAccess& access, bool in_schedule) {
  Residency& chunk = chunks_[access.chunk];
  chunk.at(access.tier).can_wait = false;
  if (access.mode == Access::write) {
    chunk.blank = false;
    ++chunk.writes;
    supersede_others(access.chunk, access.tier);
  }
  ScheduleBook::Progress progress = ScheduleBook::Progress::goes_on;
  if (in_schedule && access.tier == Tier::device) {
    progress = book_.record(access, budgets_[index_of(Tier::device)]->used() - chunk_bytes_[index_of(Tier::device)]);
  }
  if (progress != ScheduleBook::Progress::goes_on) {
    follow_pass();
  }
  if (in_schedule && progress != ScheduleBook::Progress::is_over &&
      lanes_[index_of(access.tier)].forecast.schedule() != nullptr) {
    follow(access);
  }
  lanes_[index_of(access.tier)].ahead_is_full = false;
  if (chunk.at(Tier::host).state == CopyState::valid) {
    lanes_[index_of(Tier::host)].ahead_is_full = false;  // that copy's next use is another now
  }
}

void Policy::follow(const ChunkAccess& access) {
  Forecast& forecast = lanes_[index_of(access.tier)].forecast;
  const std::size_t before = forecast.cursor();
  forecast.advance(access.chunk);
  if (forecast.cursor() != before) {
    is_settled_ = false;
  }
  if (forecast.cursor() < before) {
    look_ahead_again(access.tier);  // what was planned is behind what comes now
  }
}

bool Policy::can_grant(std::span<const ChunkAccess> accesses) const {
  return !failure_ && !accesses.empty() &&
         std::all_of(accesses.begin(), accesses.end(),
                     [&](const ChunkAccess& access) { return is_grantable(access, accesses); });
}

bool Policy::try_grant(std::span<const ChunkAccess> accesses, bool in_schedule) {
  if (!can_grant(accesses)) {
    return false;
  }
  book_.note_program_bytes(budgets_[index_of(Tier::device)]->take_program_peak());
  for (const ChunkAccess& access : accesses) {
    pin(access);
    begin_access(access, in_schedule);
  }
  if (!is_settled_) {
    advance();
  }
  return true;
}

void Policy::grant(Request& request) {
  if (!request.accesses.empty()) {
    book_.note_program_bytes(budgets_[index_of(Tier::device)]->take_program_peak());
  }
  for (std::size_t i = 0; i < request.accesses.size(); ++i) {
    if (request.held.empty() || !request.held[i]) {
      pin(request.accesses[i]);
    }
    begin_access(request.accesses[i], request.in_schedule);
  }
  request.verdict = Request::Verdict::granted;
}

void Policy::unpin(const ChunkAccess& access) {
  Residency& chunk = chunks_.at(access.chunk);
  const ChunkInfo& info = chunk.info();
  Residency::Copy& copy = chunk.at(access.tier);
  const std::uint32_t writes = access.mode == Access::write ? 1 : 0;
  if (copy.pins == 0 || copy.write_pins < writes) {
    throw LogicError("policy: a pin is released that nobody holds");
  }
  if (--copy.pins == 0 && access.tier != info.home) {
    budgets_[index_of(access.tier)]->let_go(info.room_bytes[index_of(access.tier)]);
  }
  copy.write_pins -= writes;
  if (writes > 0 && access.tier != Tier::device) {
    is_settled_ = false;  // it can come to the device ahead of need now
  }
  copy.last_use = ++clock_;
  lanes_[index_of(access.tier)].ahead_is_full = false;
  if (chunk.discard_when_idle) {
    drop_if_dead(access.chunk);
  }
  if (access.tier == Tier::device && chunk.at(info.home).state == CopyState::reserved) {  // spares most ops the call
    clean_if_done_with(access.chunk);
  }
}

void Policy::release(std::span<const ChunkAccess> accesses) {
  for (const ChunkAccess& access : accesses) {
    unpin(access);
  }
  if (!is_settled_) {
    advance();
  }
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
  was_served_ = true;
}

void Policy::advance() {
  for (Lane& lane : lanes_) {
    lane.short_of_room = false;
  }
  for (Lane& lane : lanes_) {
    serve(lane);
  }
  bool is_done = waiting() == 0;
  is_settled_ = false;
  const std::uint64_t in_flight_before = in_flight_;
  if (prefetch_depth_ > 0 && !failure_) {
    clean_by_host();
    const bool all_filled = fill_ahead();
    const bool all_on_device = look_ahead(Tier::device);
    const bool all_on_host = look_ahead(Tier::host);
    // What has been started may have changed what was looked at before it.
    is_done =
        is_done && in_flight_ == in_flight_before && done_with_.empty() && all_filled && all_on_device && all_on_host;
  }
  is_settled_ = is_done;
}

void Policy::serve(Lane& lane) {
  while (!lane.queue.empty()) {
    Request& first = *lane.queue.front();
    const Progress progress = first.accesses.empty() ? advance_room(first) : advance_accesses(first);
    if (progress == Progress::blocked) {
      return;
    }
    lane.queue.pop_front();
    was_served_ = true;
  }
}

bool Policy::try_take_room(Request& request) {
  if (!request.new_chunk) {
    return budgets_[index_of(request.program_tier)]->try_reserve(request.program_kind, request.program_bytes);
  }
  const std::optional<ChunkId> id = try_add_chunk(*request.new_chunk, request.in_place_of);
  request.chunk = id.value_or(0);
  return id.has_value();
}

Policy::Progress Policy::advance_room(Request& request) {
  const Tier tier = lane_of(request);
  const bool for_chunk = request.new_chunk.has_value();
  const Rooms rooms = for_chunk ? rooms_of(*request.new_chunk, tier) : Rooms{.bytes = request.program_bytes};
  while (!try_take_room(request)) {
    if (!make_room(tier, rooms)) {
      refuse(request, out_of_memory({.tier = tier,
                                     .bytes = rooms.bytes,
                                     .what = for_chunk ? "a new " + describe(*request.new_chunk) + " to rest there"
                                                       : "a tensor of the program",
                                     .is_limited = rooms.limited > 0}));
      return Progress::done;
    }
    if (may_become_free(tier)) {
      wait_for_room(request, tier);
      return Progress::blocked;
    }
  }
  grant(request);
  return Progress::done;
}

void Policy::wait_for_room(Request& request, Tier tier) {
  lanes_[index_of(tier)].short_of_room = true;
  if (std::exchange(request.hurried, true)) {
    return;
  }
  for (const ChunkId id : guests_[index_of(tier)]) {
    for (const Tier to : all_tiers) {
      if (chunks_[id].at(tier).outgoing > 0 && chunks_[id].at(to).state == CopyState::arriving) {
        urgent_.push_back({.chunk = id, .from = tier, .to = to});
      }
    }
  }
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
  const ChunkAccess access = request.accesses[position];
  Residency& chunk = chunks_.at(access.chunk);
  const bool writes = access.mode == Access::write;
  // Bytes that are being changed elsewhere cannot be copied, and pinned copies cannot be superseded; waiting
  // for whoever holds the pin could be waiting for oneself.
  if (writes ? chunk.pinned_elsewhere(access.tier) : chunk.changing_elsewhere(access.tier)) {
    refuse(request, std::make_exception_ptr(LogicError(
                        describe(chunk.info()) + " is wanted for " + (writes ? "writing" : "reading") + " on the " +
                        std::string(name_of(access.tier)) + " while it is held on another tier")));
    return false;
  }
  if (access.tier == Tier::device && chunk.at(Tier::device).state == CopyState::absent && comes_by_host(access.chunk)) {
    if (std::exchange(chunk.at(Tier::host).can_wait, false)) {
      urgent_.push_back({.chunk = access.chunk, .to = Tier::host});
    }
    return false;
  }
  while (chunk.at(access.tier).state == CopyState::absent) {
    if (try_take_room(access.chunk, access.tier)) {
      break;
    }
    const Rooms rooms = rooms_of(chunk.info(), access.tier);
    if (is_patient(request)) {
      make_room_patiently(access.chunk);
      return false;
    }
    if (!make_room(access.tier, rooms)) {
      refuse(request, out_of_memory({.tier = access.tier,
                                     .bytes = rooms.bytes,
                                     .what = describe(chunk.info()),
                                     .is_limited = rooms.limited > 0,
                                     .further_bytes = room_wanted_after(request, position)}));
      return false;
    }
    if (may_become_free(access.tier)) {
      wait_for_room(request, access.tier);
      return false;
    }
  }
  hold(request, position);
  if (chunk.at(access.tier).state == CopyState::reserved) {
    demand_fetches_ += access.tier == Tier::device && chunk.has_bytes() ? 1 : 0;
    start_arrival(access.chunk, access.tier, TransferPriority::demand);
  } else if (chunk.at(access.tier).state == CopyState::arriving && chunk.at(access.tier).can_wait) {
    chunk.at(access.tier).can_wait = false;
    urgent_.push_back({.chunk = access.chunk, .to = access.tier});
  }
  if (chunk.at(access.tier).state != CopyState::valid) {
    return false;
  }
  if (!writes || !chunk.in_flight()) {
    return true;
  }
  // Nobody may read the copy while it changes: what does so ahead of need is to be over soon.
  for (const Tier tier : all_tiers) {
    if (chunk.at(tier).state == CopyState::arriving && std::exchange(chunk.at(tier).can_wait, false)) {
      urgent_.push_back({.chunk = access.chunk, .to = tier});
    }
  }
  return false;
}

bool Policy::is_patient(const Request& request) const {
  // Only where there is a clock to say what is used sooner, and nobody waits for what it is for, or behind it.
  return request.patient && !updates_awaited_ && prefetch_depth_ > 0 &&
         lanes_[index_of(lane_of(request))].queue.size() == 1 && !due_.empty();
}

std::uint64_t Policy::room_wanted_after(const Request& request, std::size_t position) const {
  const Tier tier = request.accesses[position].tier;
  std::vector<ChunkId> counted{request.accesses[position].chunk};
  std::uint64_t room = 0;
  for (const ChunkAccess& access : request.accesses.subspan(position + 1)) {
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

}  // namespace terrace
