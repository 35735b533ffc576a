// What leaves the device because the program is done with it, for this pass or for long: by which way, and what waits.
#include <algorithm>
#include <iterator>

#include "memory/policy.h"

namespace terrace {
namespace {

/// Of what the device has for chunks that do not rest there, one part in so many may wait for updates, beside what
/// comes ahead of need. Found by trying: in the steps of tests/memory/virtual_step.h a half to two thirds is best, and
/// with three quarters those that links bind take longer than with nothing; in real time they do so with three fifths
/// on a machine that does other things too.
constexpr std::uint64_t waiting_part = 2;

}  // namespace

bool Policy::is_done_with(ChunkId id) const {
  const Residency& chunk = chunks_[id];
  const Residency::Copy& copy = chunk.at(Tier::device);
  const Residency::Copy& home = chunk.at(chunk.info().home);
  const Forecast& forecast = lanes_[index_of(Tier::device)].forecast;
  return home.state == CopyState::reserved && copy.state == CopyState::valid && copy.pins == 0 && prefetch_depth_ > 0 &&
         !failure_ && home.failed_writes == 0 && !chunk.is_spare(Tier::device) && !chunk.discard_when_idle &&
         (chunk.info().home == Tier::host || chunk.at(Tier::host).state == CopyState::absent) &&
         (chunk.info().kind == Kind::activation ? chunk.is_expected_to_leave
                                                : forecast.schedule() != nullptr && !forecast.used_again(id));
}

void Policy::clean_if_done_with(ChunkId id) {
  if (!is_done_with(id)) {
    return;
  }
  if (chunks_[id].info().home != Tier::nvme) {
    send_home(id);
    return;
  }
  chunks_[id].waits_for_update =
      is_made_anew_before_use(id, Tier::device) && std::find(may_wait_.begin(), may_wait_.end(), id) != may_wait_.end();
  if (!chunks_[id].waits_for_update || is_to_pass_host(id)) {
    done_with_.push_back(id);
    is_settled_ = false;
  }
}

void Policy::plan_waiting() {
  const Schedule* schedule = lanes_[index_of(Tier::device)].forecast.schedule();
  const bool will_update = schedule != nullptr && schedule->ends_with_step() && prefetch_depth_ > 0;
  may_wait_.clear();
  for (const ChunkId id : guests_[index_of(Tier::device)]) {
    chunks_[id].waits_for_update =
        chunks_[id].waits_for_update && will_update && announced_.next_use(id, 0).has_value();
  }
  if (!will_update) {
    return;
  }
  const std::uint64_t program_peak = schedule->program_peak(0, schedule->size());
  const std::uint64_t on_host = room_of_guests(Tier::host, 0);
  const std::uint64_t on_device = room_of_guests(Tier::device, program_peak) / waiting_part;
  std::uint64_t wanted_on_host = 0;  // of what comes there for updates, up to here
  std::uint64_t gradients = 0;
  std::uint64_t waiting = 0;
  for (std::size_t at = 0; at < announced_.size() && gradients < on_host + on_device; ++at) {
    const ChunkId id = announced_[at].chunk;
    const ChunkInfo& info = chunks_[id].info();
    const bool is_gradient = schedule->next_write(id, 0).has_value();
    const bool is_parameter = !is_gradient && schedule->next_use(id, 0).has_value();  // which comes and goes
    if (is_parameter || announced_.next_use(id, 0) != at) {  // a norm announces gradients before updates do
      continue;
    }
    wanted_on_host += info.home != Tier::host ? info.room_bytes[index_of(Tier::host)] : 0;
    gradients += is_gradient ? info.bytes : 0;
    const std::uint64_t room = info.room_bytes[index_of(Tier::device)];
    if (is_gradient && info.home == Tier::nvme && wanted_on_host > on_host && waiting + room <= on_device) {
      may_wait_.push_back(id);
      waiting += room;
    }
  }
}

std::vector<std::uint64_t> Policy::bytes_while_away(const Schedule& schedule) const {
  std::vector<std::uint64_t> most(chunks_.size());
  std::vector<std::uint64_t> used(chunks_.size());  // after so many bytes of accesses
  std::vector<bool> is_written(chunks_.size());
  std::uint64_t bytes = 0;
  for (std::size_t at = 0; at < schedule.size(); ++at) {
    const ChunkId id = schedule[at].chunk;
    const ChunkInfo& info = chunks_[id].info();
    if (info.home == Tier::nvme && announced_.next_use(id, 0).has_value()) {
      most[id] = is_written[id] ? std::max(most[id], bytes - used[id]) : 0;
      is_written[id] = is_written[id] || schedule[at].mode == Access::write;
      used[id] = bytes;
    }
    bytes += info.room_bytes[index_of(Tier::device)];
  }
  return most;
}

std::vector<bool> Policy::is_away_for_long(const Schedule& schedule) const {
  const std::vector<std::uint64_t> away = bytes_while_away(schedule);
  std::vector<std::uint64_t> beyond_device;
  const std::uint64_t device_room = room_of_guests(Tier::device, schedule.program_peak(0, schedule.size()));
  std::copy_if(away.begin(), away.end(), std::back_inserter(beyond_device),
               [&](std::uint64_t bytes) { return bytes > device_room; });
  std::vector<bool> result(away.size());
  if (beyond_device.empty()) {
    return result;
  }
  const auto middle = beyond_device.begin() + static_cast<std::ptrdiff_t>(beyond_device.size() / 2);
  std::nth_element(beyond_device.begin(), middle, beyond_device.end());
  std::transform(away.begin(), away.end(), result.begin(),
                 [&](std::uint64_t bytes) { return bytes > std::max(device_room, *middle / 2); });
  return result;
}

void Policy::plan_leaving() {
  straight_to_nvme_.clear();
  const Schedule* schedule = lanes_[index_of(Tier::device)].forecast.schedule();
  if (schedule == nullptr || prefetch_depth_ == 0 || announced_.size() == 0) {
    return;
  }
  const std::vector<bool> leaves = is_away_for_long(*schedule);
  const auto room_of = [&](ChunkId id) { return chunks_[id].info().room_bytes[index_of(Tier::host)]; };
  std::vector<ChunkId> leaving;  // in the order of their last uses
  std::vector<bool> is_away(chunks_.size());
  std::uint64_t wanted = 0;  // by them, of the host
  std::uint64_t most_wanted = 0;
  for (std::size_t at = 0; at < schedule->size(); ++at) {
    const ChunkId id = (*schedule)[at].chunk;
    if (leaves[id]) {
      wanted -= is_away[id] ? room_of(id) : 0;
      is_away[id] = schedule->next_use(id, at + 1).has_value();
      wanted += is_away[id] ? room_of(id) : 0;
      most_wanted = std::max(most_wanted, wanted);
      if (!is_away[id]) {
        leaving.push_back(id);
      }
    }
  }
  if (leaving.empty()) {
    return;
  }
  const double share =
      std::min(1.0, static_cast<double>(room_of_guests(Tier::host, 0)) / static_cast<double>(most_wanted));
  double may_stay = static_cast<double>(room_of(leaving.front())) / 2;  // bytes, of those up to here
  for (const ChunkId id : leaving) {
    const auto room = static_cast<double>(room_of(id));
    may_stay += share * room;
    if (may_stay >= room) {
      may_stay -= room;
    } else {
      straight_to_nvme_.push_back(id);
    }
  }
  std::sort(straight_to_nvme_.begin(), straight_to_nvme_.end());
}

std::uint64_t Policy::room_of_guests(Tier tier, std::uint64_t program_peak) const {
  const std::size_t at = index_of(tier);
  Rooms guests;
  for (const ChunkId id : guests_[at]) {
    guests += rooms_of(chunks_[id].info(), tier);
  }
  const std::uint64_t program = budgets_[at]->used() - chunk_bytes_[at];
  const std::uint64_t room = budgets_[at]->free() + vacating_bytes_[at] + guests.bytes;
  const std::uint64_t beside_program = room - std::min(room, program_peak - std::min(program_peak, program));
  return tier == Tier::device ? std::min(beside_program, device_chunk_limit_ - (limited_bytes_ - guests.limited))
                              : beside_program;
}

void Policy::send_home(ChunkId id) {
  start_transfer({.chunk = id,
                  .fill = false,
                  .from = Tier::device,
                  .to = chunks_[id].info().home,
                  .priority = TransferPriority::write_back});
}

void Policy::clean_by_host() {
  for (; !done_with_.empty(); done_with_.pop_front()) {
    const ChunkId id = done_with_.front();
    const bool visits = chunks_[id].waits_for_update;
    if (!is_done_with(id) || (visits && !is_to_pass_host(id))) {
      continue;
    }
    const std::uint64_t room_bytes = chunks_[id].info().room_bytes[index_of(Tier::host)];
    const bool stays = !visits && room_to_stay_on_host(id) != Room::none;
    const Room room = room_now(room_bytes, Tier::host);
    if (room == Room::coming || (room == Room::none && is_to_pass_host(id) && has_room_made_to_read(id))) {
      return;
    }
    if (room == Room::there && try_take_room(id, Tier::host)) {
      chunks_[id].passes_host = !stays;
      passing_bytes_ += stays ? 0 : room_bytes;
      start_arrival(id, Tier::host, TransferPriority::write_back);
    } else if (!visits) {
      send_home(id);
    }
  }
}

Policy::Room Policy::room_to_stay_on_host(ChunkId id) {
  const Lane& host = lanes_[index_of(Tier::host)];
  const auto use = host.forecast.next_use(id);
  if (!use || host.short_of_room) {
    return Room::none;
  }
  std::size_t until = *use;
  if (lanes_[index_of(Tier::device)].forecast.used_again(id)) {
    if (std::binary_search(straight_to_nvme_.begin(), straight_to_nvme_.end(), id)) {
      return Room::none;
    }
    until = std::min(until, host.forecast.schedule()->size());  // the device has it back before that
  }
  return make_room_ahead(rooms_of(chunks_[id].info(), Tier::host), Tier::host, until, distance_of(id, Tier::host));
}

Policy::Room Policy::room_now(std::uint64_t bytes, Tier tier) const {
  const std::size_t at = index_of(tier);
  if (lanes_[at].short_of_room) {
    return Room::none;
  }
  const std::uint64_t free = budgets_[at]->capacity() - budgets_[at]->used();
  return free >= bytes                                              ? Room::there
         : free + vacating_bytes_[at] + leaving_bytes_[at] >= bytes ? Room::coming
                                                                    : Room::none;
}

}  // namespace terrace
