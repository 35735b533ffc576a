// The future: what is brought ahead of need.
#include <algorithm>

#include "base/error.h"
#include "memory/policy.h"

namespace terrace {
namespace {

/// For so many chunks beside those on their way copies are made to leave, so that several write-backs are under way
/// while others arrive.
constexpr std::size_t evictions_ahead = 8;
/// Chunks that begin without bytes are filled this many accesses ahead: until they are written, evicting one is a
/// waste. With 4 or 8 half a percent less is moved to the device, but steps that links bind take 2% longer on a machine
/// that does other things too, as gradients wait for their room.
constexpr std::size_t fills_ahead = 16;
/// And so far is looked for such chunks.
constexpr std::size_t entries_looked_at = 64;

/// Of a chunk without bytes: what is read before it was written is brought by the program, in memory of its own (see
/// Policy::adopt).
bool is_written_first(const Schedule::Entry& entry) { return entry.mode == Access::write; }

}  // namespace

void Policy::announce(std::vector<ChunkId> chunks) {
  std::vector<Schedule::Entry> entries;
  entries.reserve(chunks.size());
  for (const ChunkId chunk : chunks) {
    entries.push_back({.chunk = chunk});
  }
  announced_ = Schedule(std::move(entries));
  lanes_[index_of(Tier::host)].forecast.follow(&announced_);
  time_updates();
  look_ahead_again(Tier::host);
  advance();
}

void Policy::update_done(ChunkId gradient) {
  if (Residency::Update& update = chunks_.at(gradient).update;
      update == Residency::Update::queued) {  // else it is dead
    update = Residency::Update::done;
  }
  lanes_[index_of(Tier::host)].ahead_is_full = false;  // it may leave now
  advance();
}

void Policy::set_update_queued(std::span<const ChunkId> chunks, bool queued) {
  for (const ChunkId chunk : chunks) {
    chunks_.at(chunk).update = queued ? Residency::Update::queued : Residency::Update::none;
    if (!queued) {
      plan_again(chunk, Tier::device);
    }
  }
  if (!queued) {
    lanes_[index_of(Tier::device)].ahead_is_full = false;
    advance();
  }
}

void Policy::set_updates_awaited(bool awaited) {
  updates_awaited_ = awaited;
  if (awaited) {
    advance();
  }
}

void Policy::look_ahead_again(Tier tier) {
  lanes_[index_of(tier)].planned = lanes_[index_of(tier)].forecast.cursor();
  lanes_[index_of(tier)].ahead_is_full = false;
  lanes_[index_of(Tier::host)].ahead_is_full = false;
  planned_for_device_ = 0;
}

void Policy::plan_again(ChunkId id, Tier tier) {
  Lane& lane = lanes_[index_of(tier)];
  if (const auto use = lane.forecast.next_use(id)) {
    lane.planned = std::min(lane.planned, *use);
  }
  if (const auto use = lanes_[index_of(Tier::device)].forecast.next_use(id)) {
    planned_for_device_ = std::min(planned_for_device_, *use);
  }
}

bool Policy::look_ahead(Tier tier) {
  Lane& lane = lanes_[index_of(tier)];
  const Schedule* schedule = lane.forecast.schedule();
  if (schedule == nullptr) {
    return true;
  }
  if (lane.short_of_room || lane.ahead_is_full || !look_ahead_until(schedule->size(), tier)) {
    return false;
  }
  // Updates are alike, so the host looks around the end of one into the next. What the device will want next is about
  // to be updated by then.
  return tier != Tier::host ||
         (look_ahead_for_device() && look_ahead_until(schedule->size() + lane.forecast.cursor(), tier));
}

bool Policy::look_ahead_until(std::size_t end, Tier tier) {
  Lane& lane = lanes_[index_of(tier)];
  const Schedule& schedule = *lane.forecast.schedule();
  for (lane.planned = std::max(lane.planned, lane.forecast.cursor()); lane.planned < end; ++lane.planned) {
    const ChunkId id = schedule[lane.planned % schedule.size()].chunk;
    const bool with_device = tier == Tier::host && lane.planned < schedule.size() && wanted_ahead(id, tier);
    if (with_device && !look_ahead_for_device()) {
      return false;
    }
    if (!wanted_at(lane.planned, tier)) {  // the device may have been what it is brought for
      continue;
    }
    if (lane.ahead >= prefetch_depth_ ||
        !fetch_ahead(id, tier, lane.planned, distance_of_position(lane.planned, tier),
                     lane.planned < schedule.size() ? TransferPriority::prefetch : TransferPriority::early)) {
      lane.ahead_is_full = true;
      free_more_ahead(tier, end);
      return false;
    }
  }
  return true;
}

bool Policy::look_ahead_for_device() {
  Lane& host = lanes_[index_of(Tier::host)];
  const Forecast& device = lanes_[index_of(Tier::device)].forecast;
  if (device.schedule() == nullptr) {
    return true;
  }
  // Room that is made for the one must not be taken by the other, so the two go by one order: up to what is announced
  // and is to be brought next.
  const std::size_t announced = std::min(host.planned, host.forecast.schedule()->size());
  const std::size_t end = announced == host.forecast.schedule()->size()
                              ? device.schedule()->size()
                              : std::min<std::size_t>(device.schedule()->size(),
                                                      device.cursor() + distance_of_position(announced, Tier::host));
  std::size_t& planned = planned_for_device_;
  for (planned = std::max(planned, device.cursor()); planned < end; ++planned) {
    if (host.ahead >= prefetch_depth_) {
      return false;
    }
    const ChunkId id = (*device.schedule())[planned].chunk;
    const bool superseded = (*device.schedule())[planned].mode == Access::write;
    if (superseded || chunks_[id].info().home != Tier::nvme ||
        chunks_[id].at(Tier::device).state != CopyState::absent || !wanted_ahead(id, Tier::host)) {
      continue;
    }
    const std::uint64_t distance = device.schedule()->next_use_after(planned) - device.cursor();
    const Room room = make_room_ahead(rooms_of(chunks_[id].info(), Tier::host), Tier::host, announced, distance);
    if (room == Room::coming) {
      host.ahead_is_full = true;
      return false;
    }
    if (room == Room::there) {
      fetch_ahead(id, Tier::host, announced, distance);
    }
  }
  return true;
}

bool Policy::fill_ahead() {
  Lane& lane = lanes_[index_of(Tier::device)];
  const Schedule* schedule = lane.forecast.schedule();
  if (schedule == nullptr) {
    return true;
  }
  if (lane.short_of_room || lane.ahead_is_full) {
    return false;
  }
  const std::size_t end = std::min(schedule->size(), lane.forecast.cursor() + fills_ahead);
  for (std::size_t at = lane.forecast.cursor(); at < end; ++at) {
    if (lane.ahead >= prefetch_depth_) {
      return false;
    }
    const ChunkId id = (*schedule)[at].chunk;
    if (chunks_[id].at(Tier::device).readable()) {
      continue;  // most are
    }
    if (wanted_ahead(id, Tier::device) && chunks_[id].at(Tier::device).state == CopyState::absent) {
      return false;  // what is needed sooner has the room
    }
    if (is_to_be_filled(at) && !fetch_ahead(id, Tier::device, at, distance_of_position(at, Tier::device))) {
      return false;
    }
  }
  return true;
}

bool Policy::is_to_be_filled(std::size_t position) const {
  const Forecast& device = lanes_[index_of(Tier::device)].forecast;
  const Schedule::Entry& entry = (*device.schedule())[position];
  const Residency& chunk = chunks_[entry.chunk];
  // Only for its next use: what comes later has no room kept for it (see room_wanted_before).
  return !chunk.has_bytes() && is_written_first(entry) && !chunk.in_flight() &&
         can_come_ahead(entry.chunk, Tier::device) &&
         device.schedule()->next_use(entry.chunk, device.cursor()) == position;
}

void Policy::check_settled() const {
  const auto require = [](bool holds) {
    if (!holds) {
      throw LogicError("policy: broken invariant: who is settled has nothing left to do");
    }
  };
  require(waiting() == 0);
  if (prefetch_depth_ == 0 || failure_) {
    return;
  }
  require(done_with_.empty());
  for (const Tier tier : {Tier::device, Tier::host}) {
    const Lane& lane = lanes_[index_of(tier)];
    require(lane.forecast.schedule() == nullptr || lane.planned >= lane.forecast.schedule()->size());
  }
  const Forecast& device = lanes_[index_of(Tier::device)].forecast;
  for (std::size_t at = device.cursor(); device.schedule() != nullptr && at < device.schedule()->size(); ++at) {
    require(at >= device.cursor() + fills_ahead || !is_to_be_filled(at));
  }
}

bool Policy::fetch_ahead(ChunkId id, Tier tier, std::size_t position, std::uint64_t distance,
                         TransferPriority priority) {
  if (chunks_[id].at(tier).state == CopyState::absent &&
      !(make_room_ahead(rooms_of(chunks_[id].info(), tier), tier, position, distance,
                        is_announced_at(id, tier, position)) == Room::there &&
        try_take_room(id, tier))) {
    return false;
  }
  ++lanes_[index_of(tier)].ahead;
  start_arrival(id, tier, priority);
  return true;
}

bool Policy::can_come_ahead(ChunkId id, Tier tier) const {
  const Residency& chunk = chunks_[id];
  const CopyState state = chunk.at(tier).state;
  return (state == CopyState::absent || state == CopyState::reserved) && !chunk.removed && !chunk.discard_when_idle &&
         !chunk.changing_elsewhere(tier) &&
         (tier != Tier::device || !(chunk.update != Residency::Update::none || comes_by_host(id)));
}

bool Policy::wanted_ahead(ChunkId id, Tier tier) const { return chunks_[id].has_bytes() && can_come_ahead(id, tier); }

bool Policy::wanted_at(std::size_t position, Tier tier) const {
  const Schedule& schedule = *lanes_[index_of(tier)].forecast.schedule();
  const ChunkId id = schedule[position % schedule.size()].chunk;
  const bool is_of_next_update = tier == Tier::host && position >= schedule.size();
  return wanted_ahead(id, tier) && !(is_of_next_update && lanes_[index_of(Tier::device)].forecast.written_again(id));
}

bool Policy::comes_by_host(ChunkId id) const {
  const Residency& chunk = chunks_[id];
  return chunk.info().home == Tier::nvme && chunk.at(Tier::host).state == CopyState::arriving &&
         chunk.at(Tier::nvme).readable();
}

void Policy::free_more_ahead(Tier tier, std::size_t end) {
  const std::size_t planned = lanes_[index_of(tier)].planned;
  const Schedule& schedule = *lanes_[index_of(tier)].forecast.schedule();
  Rooms rooms;
  std::vector<ChunkId> counted;
  std::size_t more = std::min(prefetch_depth_, evictions_ahead);
  for (std::size_t position = planned; position < std::min(end, planned + entries_looked_at) && more > 0; ++position) {
    const ChunkId id = schedule[position % schedule.size()].chunk;
    if (wanted_at(position, tier) && chunks_[id].at(tier).state == CopyState::absent &&
        std::find(counted.begin(), counted.end(), id) == counted.end()) {
      counted.push_back(id);
      rooms += rooms_of(chunks_[id].info(), tier);
      if (make_room_ahead(rooms, tier, position, distance_of_position(position, tier),
                          is_announced_at(id, tier, position)) == Room::none) {
        return;
      }
      --more;
    }
  }
}

Policy::Rooms Policy::room_wanted_before(std::size_t position, Tier tier) const {
  const Forecast& forecast = lanes_[index_of(tier)].forecast;
  const Schedule& schedule = *forecast.schedule();
  Rooms room;
  for (std::size_t at = forecast.cursor(); at < std::min(position, schedule.size()); ++at) {
    const ChunkId id = schedule[at].chunk;
    const bool begins_anew =
        (!chunks_[id].has_bytes() || chunks_[id].discard_when_idle) && is_written_first(schedule[at]);
    const bool comes = tier == Tier::device && (chunks_[id].update != Residency::Update::none || comes_by_host(id));
    if ((begins_anew || comes) && !chunks_[id].removed && chunks_[id].at(tier).state == CopyState::absent &&
        schedule.next_use(id, forecast.cursor()) == at) {
      room += rooms_of(chunks_[id].info(), tier);
    }
  }
  // What is announced again and is made, or made anew, on the device comes from there by the end of this pass.
  for (std::size_t at = 0; tier == Tier::host && at + schedule.size() < position; ++at) {
    const ChunkId id = schedule[at].chunk;
    const Residency& chunk = chunks_[id];
    const auto comes = [&] {
      return !chunk.at(Tier::nvme).readable() || lanes_[index_of(Tier::device)].forecast.written_again(id);
    };
    if (!chunk.removed && chunk.at(Tier::host).state == CopyState::absent && schedule.next_use(id, 0) == at &&
        comes()) {
      room += rooms_of(chunk.info(), tier);
    }
  }
  return room;
}

bool Policy::is_announced_at(ChunkId id, Tier tier, std::size_t position) const {
  return tier == Tier::host && position < announced_.size() && announced_[position].chunk == id;
}

bool Policy::will_fit_as_gradients_die(std::uint64_t bytes, std::size_t position) const {
  const std::size_t host = index_of(Tier::host);
  const Schedule& schedule = *lanes_[host].forecast.schedule();
  // The first of what is updated together is a parameter. A gradient dies only when the others of its set are there.
  std::size_t set = position;
  while (set > 0 && chunks_[schedule[set].chunk].info().kind != Kind::parameter) {
    --set;
  }
  std::uint64_t room = budgets_[host]->free() + coming_free_on_host();
  for (const ChunkId id : guests_[host]) {
    const Residency& chunk = chunks_[id];
    const bool dies = chunk.info().kind == Kind::gradient && chunk.update == Residency::Update::queued &&
                      !chunk.passes_host && chunk.at(Tier::host).state != CopyState::leaving;
    if (const auto use = dies ? next_announced(id) : std::nullopt; use && *use < set) {
      room += chunk.info().room_bytes[host];
    }
  }
  for (std::size_t at = position + 1; at < schedule.size() && bytes <= room; ++at) {
    const ChunkId id = schedule[at].chunk;
    const bool comes = wanted_at(at, Tier::host) && chunks_[id].at(Tier::host).state == CopyState::absent;
    bytes += comes ? chunks_[id].info().room_bytes[host] : 0;
  }
  return bytes <= room;
}

Policy::Room Policy::make_room_ahead(const Rooms& rooms, Tier tier, std::size_t position, std::uint64_t distance,
                                     bool announced) {
  const std::size_t at = index_of(tier);
  const Forecast& forecast = lanes_[at].forecast;
  const std::uint64_t used_by_others = budgets_[at]->used() - chunk_bytes_[at];
  const std::uint64_t others = std::max(used_by_others, forecast.schedule()->program_peak(forecast.cursor(), position));
  Rooms wanted = room_wanted_before(position, tier);
  wanted += rooms;
  wanted.bytes += tier == Tier::host ? room_kept_to_read() : 0;
  const auto fits = [&](std::uint64_t chunk_bytes) {
    return chunk_bytes + wanted.bytes + others <= budgets_[at]->capacity();
  };
  const auto is_within_limit = [&](std::uint64_t limited) {
    return wanted.limited == 0 || limited + wanted.limited <= device_chunk_limit_;
  };
  if (fits(chunk_bytes_[at]) && is_within_limit(limited_bytes_)) {
    return Room::there;
  }
  const std::uint64_t passing = tier == Tier::host ? passing_bytes_ : 0;
  if (tier == Tier::host &&
      !fits(chunk_bytes_[at] - vacating_bytes_[at] - leaving_bytes_[at] - passing - could_leave_host(distance))) {
    return Room::none;
  }
  if (announced && will_fit_as_gradients_die(wanted.bytes, position)) {
    return Room::coming;
  }
  for (;;) {
    const bool will_fit = fits(chunk_bytes_[at] - vacating_bytes_[at] - leaving_bytes_[at] - passing);
    if (will_fit && is_within_limit(limited_bytes_ - limited_coming_)) {
      return Room::coming;
    }
    const std::optional<ChunkId> other = victim(tier, distance, will_fit);
    if (!other) {
      return Room::none;
    }
    evict(*other, tier, TransferPriority::write_back);
  }
}

}  // namespace terrace
