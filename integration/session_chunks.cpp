// Which chunks a session has, and where they rest.

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "integration/element_types.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

std::uint64_t saturating_subtract(std::uint64_t from, std::uint64_t what) { return from - std::min(from, what); }

}  // namespace

void SessionState::add_optimizer_chunks(bool with_variance) {
  std::vector<ChunkRequest> requests;
  for (const Kind kind : {Kind::master, Kind::momentum, Kind::variance}) {
    for (std::uint32_t set = 0; set < chunk_sets_.size() && (kind != Kind::variance || with_variance); ++set) {
      const SetInfo& info = set_infos_[set];
      const ChunkRequest request{set, kind};
      if (info.trainable && (info.type == at::kFloat || info.type == at::kBFloat16) && !state_chunk(request) &&
          bytes_of(request) > 0) {
        requests.push_back(request);
      }
    }
  }
  if (requests.empty()) {
    return;
  }
  updates_->settle();  // what an update holds on the host could not leave
  const std::vector<std::uint32_t> moved = make_way_for(requests);
  try {
    add_optimizer_chunks(requests);
  } catch (const OutOfMemory&) {
    if (moved.empty()) {
      throw;
    }
    // Chunks that fill one tier to the last may fit in one order and not in another.
    for (const std::uint32_t set : moved) {
      move_gradients(set, Tier::host);
    }
    add_optimizer_chunks(requests);
  }
  note_waste();
}

void SessionState::add_optimizer_chunks(std::span<const ChunkRequest> requests) {
  const std::vector<Tier> homes = choose_homes_for(requests, config_.placement.optimizer, {});
  try {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      state_chunk(requests[i]) = add_chunk(requests[i], homes[i]);
      const at::ScalarType type = set_infos_[requests[i].set].type;
      chunk_sets_[requests[i].set].type = element_type(type);
      chunk_sets_[requests[i].set].gradient_type = element_type(gradient_type_of(type));
      chunk_sets_[requests[i].set].states = state_format_;
    }
    check_room_to_work();
  } catch (...) {
    for (const ChunkRequest& request : requests) {
      if (std::optional<ChunkId>& added = state_chunk(request)) {
        remove_chunk(*added);
        added.reset();
      }
    }
    throw;
  }
}

std::optional<ChunkId>& SessionState::state_chunk(const ChunkRequest& request) {
  ChunkSet& set = chunk_sets_[request.set];
  return request.kind == Kind::master ? set.master : request.kind == Kind::momentum ? set.momentum : set.variance;
}

void SessionState::move_gradients(std::uint32_t set, Tier home) {
  const ChunkId there = add_chunk({set, Kind::gradient}, home);
  remove_chunk(std::exchange(chunk_sets_[set].gradient.value(), there));
  for (ManagedParameter& parameter : parameters_) {
    if (parameter.chunk_set == set) {
      parameter.gradient_chunk = there;
    }
  }
}

RestingRoom SessionState::not_for_resting(const RestingRoom& to_be_freed) const {
  RestingRoom taken = rested_;
  taken[index_of(Tier::host)] +=
      largest_update_room() +
      saturating_subtract(memory_.budget(Tier::host).used(Kind::other), to_be_freed[index_of(Tier::host)]);
  taken[index_of(Tier::nvme)] += saturating_subtract(spillable_.nvme_bytes(), to_be_freed[index_of(Tier::nvme)]);
  taken[index_of(Tier::device)] += memory_.budget(Tier::device).used(Kind::buffer);
  return taken;
}

RestingRoom SessionState::told_to_rest_later() const {
  std::array<double, tier_count> later{};
  const auto add = [&](std::uint32_t set, Kind kind, const std::optional<Config::Shares>& shares) {
    const std::uint64_t bytes = bytes_of({set, kind});
    if (shares && bytes > 0) {
      const RestingRoom room = memory_.stream().room_bytes(bytes);
      later[index_of(Tier::device)] += shares->device * static_cast<double>(room[index_of(Tier::device)]);
      later[index_of(Tier::host)] += shares->host * static_cast<double>(room[index_of(Tier::host)]);
      later[index_of(Tier::nvme)] += shares->nvme * static_cast<double>(room[index_of(Tier::nvme)]);
    }
  };
  for (std::uint32_t set = 0; set < set_infos_.size(); ++set) {
    if (!set_infos_[set].trainable || set_infos_[set].parameters == 0) {
      continue;
    }
    const bool is_there = set < chunk_sets_.size();
    if (!is_there || !chunk_sets_[set].gradient) {
      add(set, Kind::gradient, config_.placement.gradients);
    }
    if (!is_there || !chunk_sets_[set].momentum) {
      for (const Kind kind : {Kind::master, Kind::momentum, Kind::variance}) {
        add(set, kind, config_.placement.optimizer);
      }
    }
  }
  RestingRoom room{};
  std::transform(later.begin(), later.end(), room.begin(),
                 [](double bytes) { return static_cast<std::uint64_t>(std::ceil(bytes)); });
  return room;
}

StepRates SessionState::step_rates() const {
  StepRates rates{.read_bytes_per_second = memory_.plan().nvme_read_rate,
                  .write_bytes_per_second = memory_.plan().nvme_write_rate};
  for (const Model& model : models_) {
    rates.forward_seconds = std::max(rates.forward_seconds, model.notes.forward_seconds);
    rates.backward_seconds = std::max(rates.backward_seconds, model.notes.backward_seconds);
  }
  return rates;
}

std::vector<std::uint32_t> SessionState::make_way_for(std::span<const ChunkRequest> states) {
  const auto& shares = config_.placement.optimizer;
  std::vector<std::uint32_t> moved;
  if (!places_gradients_by_notes() || (shares && shares->host == 0)) {
    return moved;
  }
  gradients_->notice_dead_storages();
  std::vector<bool> holds_something(chunk_sets_.size(), false);
  for (const ManagedParameter& parameter : parameters_) {
    if (parameter.tensor.grad().defined() || !parameter.gradient.expired()) {
      holds_something[parameter.chunk_set] = true;
    }
  }
  double host_bytes = 0;
  double nvme_bytes = 0;
  for (const ChunkRequest& request : states) {
    const RestingRoom room = memory_.stream().room_bytes(bytes_of(request));
    host_bytes += static_cast<double>(room[index_of(Tier::host)]) * (shares ? shares->host : 1);
    nvme_bytes += static_cast<double>(room[index_of(Tier::nvme)]) * (shares ? shares->nvme : 0);
  }
  const RestingRoom taken = not_for_resting({});
  const auto left = [&](Tier tier) {
    return saturating_subtract(memory_.budget(tier).capacity(), taken[index_of(tier)]);
  };
  std::uint64_t lacking = saturating_subtract(static_cast<std::uint64_t>(host_bytes), left(Tier::host));
  std::uint64_t on_nvme = saturating_subtract(left(Tier::nvme), static_cast<std::uint64_t>(nvme_bytes));
  std::uint64_t may_move = gradient_bytes_for_nvme(lacking, step_rates());
  // The last first: backward makes their gradients first, and the update wants them last.
  for (auto set = static_cast<std::uint32_t>(chunk_sets_.size()); set-- > 0 && may_move > 0;) {
    const std::optional<ChunkId>& gradient = chunk_sets_[set].gradient;
    if (!gradient || !set_infos_[set].gradients_read_once || set_infos_[set].parameters == 0 || holds_something[set] ||
        memory_.stream().inspect([&](const Policy& policy) { return policy.chunk(*gradient).info().home; }) !=
            Tier::host) {
      continue;
    }
    const RestingRoom room = memory_.stream().room_bytes(bytes_of({set, Kind::gradient}));
    const std::uint64_t still_lacking = saturating_subtract(lacking, room[index_of(Tier::host)]);
    if (room[index_of(Tier::nvme)] + still_lacking > on_nvme) {
      break;  // there is no more room there than for what states lack
    }
    move_gradients(set, Tier::nvme);
    moved.push_back(set);
    on_nvme -= room[index_of(Tier::nvme)];
    lacking = still_lacking;
    may_move = saturating_subtract(may_move, room[index_of(Tier::host)]);
  }
  return moved;
}

std::vector<Tier> SessionState::choose_homes_for(std::span<const ChunkRequest> requests,
                                                 const std::optional<Config::Shares>& shares,
                                                 const RestingRoom& to_be_freed) const {
  std::vector<std::array<std::uint64_t, tier_count>> rooms;
  std::uint64_t largest_on_device = 0;
  for (const ChunkRequest& request : requests) {
    rooms.push_back(memory_.stream().room_bytes(bytes_of(request)));
    largest_on_device = std::max(largest_on_device, rooms.back()[index_of(Tier::device)]);
  }
  RestingRoom taken = not_for_resting(to_be_freed);
  taken[index_of(Tier::device)] += 2 * largest_on_device;
  const RestingRoom later = shares ? RestingRoom{} : told_to_rest_later();
  const auto choose = [&](const RestingRoom& kept) {
    RestingRoom room{};
    for (const Tier tier : all_tiers) {
      const std::uint64_t most = tier == Tier::device
                                     ? std::min(memory_.budget(tier).capacity(), memory_.plan().device_chunk_limit)
                                     : memory_.budget(tier).capacity();
      room[index_of(tier)] = saturating_subtract(most, taken[index_of(tier)] + kept[index_of(tier)]);
    }
    const RestingRoom before = room;
    std::vector<Tier> homes = choose_homes(rooms, shares, room);
    require_room_to_rest(requests, homes, shares, to_be_freed);
    for (const Tier tier : {Tier::device, Tier::host}) {
      // By default what finds no room here rests elsewhere: with a smaller budget these homes would be others.
      const std::uint64_t placed = before[index_of(tier)] - room[index_of(tier)];
      if (!shares && placed > 0) {
        memory_.budget(tier).need(taken[index_of(tier)] + kept[index_of(tier)] + placed);
      }
    }
    return homes;
  };
  if (later == RestingRoom{}) {
    return choose(later);
  }
  try {
    return choose(later);
  } catch (const OutOfMemory&) {
    return choose({});  // not all of it may come: some optimizers keep less, and some models have none
  }
}

ChunkId SessionState::add_chunk(const ChunkRequest& request, Tier home) {
  const std::uint64_t bytes = bytes_of(request);
  const ChunkId id = memory_.stream().add_chunk(request.kind, request.set, bytes, home);
  rested_[index_of(home)] += memory_.stream().room_bytes(bytes)[index_of(home)];
  keep_host_for_chunks();
  return id;
}

void SessionState::remove_chunk(ChunkId id) {
  const ChunkInfo info = memory_.stream().inspect([&](const Policy& policy) { return policy.chunk(id).info(); });
  rested_[index_of(info.home)] -= info.room_bytes[index_of(info.home)];
  keep_host_for_chunks();
  memory_.stream().remove_chunk(id);
}

void SessionState::remove_set(std::uint32_t set) {
  const ChunkSet& chunks = chunk_sets_[set];
  set_infos_[set] = {};  // first: nothing is kept for its update any more
  for (const auto& id :
       {std::optional(chunks.parameter), chunks.gradient, chunks.master, chunks.momentum, chunks.variance}) {
    if (id) {
      remove_chunk(*id);
    }
  }
}

void SessionState::remove_empty_sets() {
  for (std::uint32_t set = 0; set < set_infos_.size(); ++set) {
    if (set_infos_[set].parameters == 0 && set_infos_[set].elements > 0) {
      remove_set(set);
    }
  }
}

std::uint64_t SessionState::bytes_of(const SetInfo& info, Kind kind) const {
  switch (kind) {
    case Kind::master:
      return info.elements * master_bytes(state_format_, element_type(info.type));
    case Kind::momentum:
    case Kind::variance:
      return info.elements * terrace::bytes_of(moment_type(state_format_));
    case Kind::gradient:
      return info.elements * c10::elementSize(gradient_type_of(info.type));
    default:
      return info.elements * c10::elementSize(info.type);
  }
}

}  // namespace terrace
