// Room: taken, made by eviction, and what is said where there is none.
#include <algorithm>

#include "base/error.h"
#include "base/units.h"
#include "memory/policy.h"

namespace terrace {
namespace {

/// Of a transfer that a copy spares by staying for so long, what each entry of that time is worth.
double each_of(std::uint64_t distance) noexcept {
  return distance == Forecast::never ? 0 : 1 / (static_cast<double>(distance) + 1);
}

/// A write-back that a copy spares counts as so many fetches. Found by trying: over random passes that read and write,
/// transfers are fewest from 2.5 to 4, and by one, which is what it costs, twice as many are lost (see
/// tests/memory/eviction_optimum_test.cpp). For the distance to a copy's next use is only what is left of the way from
/// the last one, and where it stays for that, a whole way comes after it.
constexpr double write_back_worth = 3;

}  // namespace

Policy::Rooms Policy::rooms_of(const ChunkInfo& info, Tier tier) {
  const std::uint64_t bytes = info.room_bytes[index_of(tier)];
  return {.bytes = bytes, .limited = tier == Tier::device && info.kind != Kind::activation ? bytes : 0};
}

void Policy::count_leaving(const ChunkInfo& info, Tier tier) {
  const Rooms rooms = rooms_of(info, tier);
  leaving_bytes_[index_of(tier)] += rooms.bytes;
  limited_coming_ += rooms.limited;
}

void Policy::count_not_leaving(const ChunkInfo& info, Tier tier) {
  const Rooms rooms = rooms_of(info, tier);
  leaving_bytes_[index_of(tier)] -= rooms.bytes;
  limited_coming_ -= rooms.limited;
}

bool Policy::try_take_room(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  const Rooms rooms = rooms_of(chunk.info(), tier);
  if (rooms.limited > 0 && limited_bytes_ + rooms.limited > device_chunk_limit_) {
    return false;
  }
  if (!budgets_[index_of(tier)]->try_reserve(chunk.info().kind, rooms.bytes)) {
    return false;
  }
  take_counted_room(id, tier);
  return true;
}

void Policy::take_counted_room(ChunkId id, Tier tier) {
  Residency& chunk = chunks_[id];
  const std::size_t at = index_of(tier);
  const std::uint64_t room = chunk.info().room_bytes[at];
  chunk_bytes_[at] += room;
  peak_chunk_bytes_[at] = std::max(peak_chunk_bytes_[at], chunk_bytes_[at]);
  limited_bytes_ += rooms_of(chunk.info(), tier).limited;
  chunk.step(tier, CopyStep::reserve);
  if (tier != chunk.info().home) {
    guests_[at].push_back(id);
  } else {
    budgets_[at]->hold(room);
  }
}

std::optional<ChunkId> Policy::try_add_chunk(const ChunkInfo& info, std::optional<ChunkId> in_place_of) {
  const ChunkId id = in_place_of.value_or(static_cast<ChunkId>(chunks_.size()));
  Residency fresh(info);
  fresh.is_expected_to_leave = in_place_of ? chunks_.at(id).had_to_leave : activations_leave_;
  if (id == chunks_.size()) {
    chunks_.push_back(fresh);
  } else {
    chunks_[id] = fresh;
  }
  if (try_take_room(id, info.home)) {
    return id;
  }
  if (in_place_of) {
    chunks_[id].removed = true;
    chunks_[id].had_to_leave = fresh.is_expected_to_leave;
  } else {
    chunks_.pop_back();
  }
  return std::nullopt;
}

bool Policy::is_gone(ChunkId id) const {
  const Residency& chunk = chunks_.at(id);
  return chunk.removed && !chunk.discard_when_idle;
}

bool Policy::make_room(Tier tier, const Rooms& rooms) {
  for (Rooms missing = shortage(tier, rooms); missing != Rooms{}; missing = shortage(tier, rooms)) {
    const std::optional<ChunkId> id = victim(tier, std::nullopt, missing.bytes == 0);
    if (!id) {
      return may_become_free(tier);
    }
    // To write one that is wanted sooner would take longer.
    if (chunks_[*id].info().kind == Kind::activation && !chunks_[*id].is_spare(tier) &&
        being_cleaned(tier, distance_of(*id, tier)) >= missing.bytes) {
      return true;
    }
    // It, or one like it, will pass the host once others have.
    if (tier == Tier::device && is_to_pass_host(*id) && is_done_with(*id) && !done_with_.empty() &&
        coming_free_on_host() > 0 && in_flight_ + under_reading_ > 0) {
      return true;
    }
    evict(*id, tier, TransferPriority::demand);
  }
  return true;
}

std::uint64_t Policy::being_cleaned(Tier tier, std::uint64_t distance) const {
  std::uint64_t bytes = 0;
  for (const ChunkId guest : guests_[index_of(tier)]) {
    const Residency& chunk = chunks_[guest];
    const Residency::Copy& copy = chunk.at(tier);
    const bool is_being_cleaned = copy.state == CopyState::valid && copy.pins == 0 && copy.outgoing > 0;
    bytes += is_being_cleaned && distance_of(guest, tier) > distance ? chunk.info().room_bytes[index_of(tier)] : 0;
  }
  return bytes;
}

std::uint64_t Policy::could_leave_host(std::uint64_t distance) const {
  std::uint64_t bytes = 0;
  for (const ChunkId guest : guests_[index_of(Tier::host)]) {
    if (can_leave(guest, Tier::host) && distance_of(guest, Tier::host) > distance) {
      bytes += chunks_[guest].info().room_bytes[index_of(Tier::host)];
    }
  }
  return bytes;
}

void Policy::make_room_patiently(ChunkId id) {
  const Rooms rooms = rooms_of(chunks_[id].info(), Tier::host);
  const std::uint64_t distance = distance_of(id, Tier::host);
  if (could_leave_host(distance) < shortage(Tier::host, rooms).bytes) {
    return;
  }
  while (shortage(Tier::host, rooms).bytes > 0) {
    evict(victim(Tier::host, distance, false).value(), Tier::host, TransferPriority::write_back);
  }
  lanes_[index_of(Tier::host)].short_of_room = true;
}

void Policy::evict(ChunkId id, Tier tier, TransferPriority priority) {
  Residency& chunk = chunks_[id];
  plan_again(id, tier);
  if (tier == Tier::device && chunk.info().kind == Kind::activation && !was_read_in_pass(id)) {
    chunk.had_to_leave = activations_leave_ = true;
  }
  if (chunk.is_spare(tier)) {
    vacate(id, tier);
  } else {
    const bool by_host = tier == Tier::device && chunk.info().home == Tier::nvme &&
                         chunk.at(Tier::host).state == CopyState::absent &&
                         lanes_[index_of(Tier::host)].queue.empty() && room_to_stay_on_host(id) == Room::there &&
                         try_take_room(id, Tier::host);
    chunk.step(tier, CopyStep::leave);
    count_leaving(chunk.info(), tier);
    start_transfer({.chunk = id,
                    .fill = false,
                    .from = tier,
                    .to = by_host ? Tier::host : chunk.info().home,
                    .priority = priority});
  }
}

void Policy::vacate(ChunkId id, Tier tier) {
  chunks_[id].step(tier, CopyStep::vacate);
  chunks_[id].waits_for_update = chunks_[id].waits_for_update && tier != Tier::device;
  if (tier != chunks_[id].info().home) {
    std::vector<ChunkId>& guests = guests_[index_of(tier)];
    guests.erase(std::find(guests.begin(), guests.end(), id));
  }
  vacating_bytes_[index_of(tier)] += chunks_[id].info().room_bytes[index_of(tier)];
  limited_coming_ += rooms_of(chunks_[id].info(), tier).limited;
  vacates_.push_back({id, tier});
}

Policy::Rooms Policy::shortage(Tier tier, const Rooms& wanted) const {
  const std::size_t at = index_of(tier);
  const auto missing = [](std::uint64_t needed, std::uint64_t limit) { return needed > limit ? needed - limit : 0; };
  // What is coming is used still.
  const std::uint64_t used = budgets_[at]->used() - vacating_bytes_[at] - leaving_bytes_[at];
  const std::uint64_t limited = limited_bytes_ - limited_coming_;
  return {.bytes = missing(used + wanted.bytes, budgets_[at]->capacity()),
          .limited = wanted.limited > 0 ? missing(limited + wanted.limited, device_chunk_limit_) : 0};
}

bool Policy::was_read_in_pass(ChunkId id) const {
  const Forecast& forecast = lanes_[index_of(Tier::device)].forecast;
  return chunks_[id].info().kind == Kind::activation && forecast.schedule() != nullptr && !forecast.used_again(id);
}

bool Policy::is_made_anew_before_use(ChunkId id, Tier tier) const {
  const Forecast& forecast = lanes_[index_of(Tier::device)].forecast;
  return tier == Tier::device && forecast.schedule() != nullptr && forecast.schedule()->ends_with_step() &&
         !forecast.used_again(id) && announced_.next_use(id, 0).has_value();
}

std::optional<ChunkId> Policy::victim(Tier tier, std::optional<std::uint64_t> distance, bool limited) const {
  std::optional<ChunkId> found;
  double least = 0;
  bool found_clean = false;
  for (const ChunkId id : guests_[index_of(tier)]) {
    if (!can_leave(id, tier) || (limited && rooms_of(chunks_[id].info(), tier).limited == 0)) {
      continue;
    }
    const std::uint64_t away = distance_of(id, tier);
    if (distance && away <= *distance) {
      continue;
    }
    const bool clean = chunks_[id].is_spare(tier);
    // What waits and is on the host as well is so for a moment only.
    if (distance && tier == Tier::device &&
        (chunks_[id].waits_for_update ? !clean || chunks_[id].passes_host
                                      : !clean && (was_read_in_pass(id) || is_to_pass_host(id)))) {
      continue;
    }
    const double worth = (is_made_anew_before_use(id, tier) ? 0 : each_of(away)) +
                         (clean ? 0 : write_back_worth * each_of(distance_of_write(id, tier)));
    const auto last_use = [&](ChunkId other) { return chunks_[other].at(tier).last_use; };
    const bool better =
        !found || worth < least ||
        (worth == least && (clean != found_clean && lanes_[index_of(tier)].forecast.schedule() != nullptr
                                ? clean
                                : last_use(id) < last_use(*found)));
    if (better) {
      found = id;
      least = worth;
      found_clean = clean;
    }
  }
  return found;
}

bool Policy::can_leave(ChunkId id, Tier tier) const {
  const Residency& chunk = chunks_[id];
  const Residency::Copy& copy = chunk.at(tier);
  // Where the home is just being filled, its copy has to come first: nothing else can be brought there.
  return copy.state == CopyState::valid && copy.pins == 0 && copy.outgoing == 0 && chunk.info().home != tier &&
         !(tier == Tier::host && chunk.being_read) &&
         (chunk.is_spare(tier) || chunk.at(chunk.info().home).state != CopyState::arriving);
}

std::uint64_t Policy::distance_of(ChunkId id, Tier tier) const {
  const Forecast& forecast = lanes_[index_of(tier)].forecast;
  if (tier != Tier::host) {
    return forecast.distance(id);
  }
  // The device is brought its bytes from here.
  const auto use = next_announced(id);
  const std::uint64_t here = use ? distance_of_position(*use, tier) : Forecast::never;
  return std::min(here, lanes_[index_of(Tier::device)].forecast.distance(id));
}

/// An update writes states and parameters, and gradients die of it.
std::uint64_t Policy::distance_of_write(ChunkId id, Tier tier) const {
  const Forecast& forecast = lanes_[index_of(tier)].forecast;
  if (tier == Tier::device) {
    return forecast.distance_of_write(id);
  }
  const auto use = next_announced(id);
  return use ? distance_of_position(*use, tier) : Forecast::never;
}

std::optional<std::size_t> Policy::next_announced(ChunkId id) const {
  const Forecast& forecast = lanes_[index_of(Tier::host)].forecast;
  const auto use = forecast.next_use(id);
  const bool was_passed_over =
      use && *use >= forecast.schedule()->size() && chunks_[id].update == Residency::Update::queued;
  return was_passed_over ? *use - forecast.schedule()->size() : use;
}

std::uint64_t Policy::distance_of_position(std::size_t position, Tier tier) const {
  const Forecast& forecast = lanes_[index_of(tier)].forecast;
  const auto from = [](std::size_t cursor, std::size_t at) { return at < cursor ? 0 : at - cursor; };
  if (tier != Tier::host || due_.empty()) {
    return from(forecast.cursor(), position);
  }
  const Forecast& device = lanes_[index_of(Tier::device)].forecast;
  return position < due_.size() ? from(device.cursor(), due_[position])
                                : from(device.cursor(), device.schedule()->size() + due_.at(position - due_.size()));
}

void Policy::time_updates() {
  const Forecast& device = lanes_[index_of(Tier::device)].forecast;
  due_.clear();
  if (device.schedule() == nullptr) {
    return;
  }
  // The first of what is updated together is a parameter; what is before all of them is for the first update.
  due_.resize(announced_.size());
  std::size_t due = device.cursor() + device.schedule()->size();
  std::size_t end = due_.size();
  const auto set_due = [&](std::size_t from) {
    std::fill(due_.begin() + static_cast<std::ptrdiff_t>(from), due_.begin() + static_cast<std::ptrdiff_t>(end), due);
    end = from;
  };
  for (std::size_t position = end; position-- > 0;) {
    const ChunkId id = announced_[position].chunk;
    if (chunks_[id].info().kind == Kind::parameter) {
      due = std::min(due, device.next_use(id).value_or(due));
      set_due(position);
    }
  }
  set_due(0);
}

std::exception_ptr Policy::out_of_memory(const Lack& lack) const {
  const Tier tier = lack.tier;
  const std::size_t at = index_of(tier);
  const Budget& budget = *budgets_[at];
  Rooms can_leave_soon;
  Rooms resting;
  for (const Residency& chunk : chunks_) {
    if (chunk.info().home == tier && !chunk.removed) {
      resting += rooms_of(chunk.info(), tier);
    }
    if (lack.evicts && chunk.at(tier).state == CopyState::valid && chunk.at(tier).pins == 0 &&
        chunk.info().home != tier) {
      can_leave_soon += rooms_of(chunk.info(), tier);
    }
  }
  const std::uint64_t evictable = can_leave_soon.bytes;
  const std::uint64_t wanted = lack.bytes + lack.further_bytes;
  const std::string name(name_of(tier));
  std::string message =
      name + ": " + format_bytes(lack.bytes) + " for " + lack.what + " do not fit; " + budget.describe();
  const std::uint64_t held_chunks = limited_bytes_ - std::min(can_leave_soon.limited, limited_bytes_);
  if (lack.is_limited && held_chunks + wanted > device_chunk_limit_) {
    message +=
        "; chunks hold " + format_bytes(limited_bytes_) + " of device.chunks " + format_bytes(device_chunk_limit_);
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
  const std::uint64_t least = held + wanted;
  std::string hint = budget.hint_to_hold(least);
  if (tier != Tier::nvme) {
    hint += ", and more for what comes after it (a step that has run tells how much: MemoryUsage::needed)";
  }
  if (tier == Tier::device) {
    if (resting.bytes > 0) {
      hint += ", let less than " + format_bytes(resting.bytes) +
              " of chunks rest there (by default those do for which host.memory and nvme.memory have no room)";
    }
    hint += ", lower the micro-batch, or build the model inside Session::construct if it was built outside";
  }
  return std::make_exception_ptr(OutOfMemory(message, hint));
}

}  // namespace terrace
