// Whether there is room: for chunks to rest, for tensors to move into them, and to work in beside what rests.

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "integration/session_state.h"

namespace terrace {

void SessionState::require_room_to_rest(std::span<const ChunkRequest> requests, std::span<const Tier> homes,
                                        const std::optional<Config::Shares>& shares,
                                        const RestingRoom& to_be_freed) const {
  RestingRoom needed = rested_;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    needed[index_of(homes[i])] += memory_.stream().room_bytes(bytes_of(requests[i]))[index_of(homes[i])];
  }
  const Kind kind = requests.empty() ? Kind::parameter : requests.front().kind;
  const bool are_states = kind != Kind::parameter && kind != Kind::gradient;
  const std::uint64_t tensors = memory_.budget(Tier::host).used(Kind::other);
  // With NVMe tensors of the program's leave the host for them.
  needed[index_of(Tier::host)] +=
      (are_states ? largest_visit_of_update(requests, homes) : 0) +
      (memory_.has_nvme() ? room_without_tensors() : tensors - std::min(tensors, to_be_freed[index_of(Tier::host)]));
  needed[index_of(Tier::device)] += memory_.budget(Tier::device).used(Kind::buffer);
  const auto lacking = [&](Tier tier) {
    return needed[index_of(tier)] - std::min(needed[index_of(tier)], memory_.budget(tier).capacity());
  };
  for (const Tier tier : all_tiers) {
    if (lacking(tier) == 0) {
      continue;
    }
    std::string hint = memory_.budget(tier).hint_to_hold(needed[index_of(tier)]);
    if (!memory_.has_nvme()) {
      hint += ", or give nvme.paths";
    } else if (tier == Tier::host && !shares && std::find(homes.begin(), homes.end(), tier) != homes.end()) {
      // It has what NVMe has no room for.
      const Budget& nvme = memory_.budget(Tier::nvme);
      hint += ", or nvme.memory to about " + format_bytes(nvme.setting_for(nvme.capacity() + lacking(tier)));
    } else {
      hint += ", or let less rest there";
    }
    throw OutOfMemory(std::string(name_of(tier)) + ": chunks of " + std::string(name_of(kind)) +
                          " and what else is to be there take " + format_bytes(needed[index_of(tier)]) +
                          ", in a budget of " + format_bytes(memory_.budget(tier).capacity()),
                      hint);
  }
}

void SessionState::require_room_to_move_in(
    std::span<const ChunkRequest> requests, std::span<const Tier> homes,
    std::span<const std::vector<ManagedParameter*>> members,
    const std::unordered_map<const ManagedParameter*, BytesOnHost>& on_host) const {
  const bool has_nvme = memory_.has_nvme();
  const Budget& host = memory_.budget(Tier::host);
  std::uint64_t used = rested_[index_of(Tier::host)] + (has_nvme ? room_without_tensors() : host.used(Kind::other));
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::uint64_t room = memory_.stream().room_bytes(bytes_of(requests[i]))[index_of(Tier::host)];
    std::uint64_t moved = 0;
    std::uint64_t largest_tensor = 0;
    for (const ManagedParameter* const parameter : members[i]) {
      moved += on_host.at(parameter).now;
      largest_tensor = std::max(largest_tensor, on_host.at(parameter).as_it_moves);
    }
    // It is filled there, wherever it rests. With NVMe all tensors but the one that moves can leave.
    most = std::max(most, used + room + (has_nvme ? largest_tensor : 0));
    used += (homes[i] == Tier::host ? room : 0) - (has_nvme ? 0 : moved);
  }
  if (most > host.capacity()) {
    throw OutOfMemory("host: moving parameters into chunks takes " + format_bytes(most) +
                          " at one moment, in a budget of " + format_bytes(host.capacity()),
                      host.hint_to_hold(most) + (has_nvme ? ", or let less rest there" : ", or give nvme.paths"));
  }
}

std::uint64_t SessionState::room_without_tensors() const {
  return memory_.plan().staging_bytes() + memory_.plan().timeline_bytes;
}

std::uint64_t SessionState::largest_visit_of_update(std::span<const ChunkRequest> planned,
                                                    std::span<const Tier> homes) const {
  std::vector<std::uint64_t> visits(set_infos_.size());
  const auto add = [&](const ChunkRequest& request, Tier home) {
    if (home != Tier::host && set_infos_[request.set].parameters > 0) {
      visits[request.set] += memory_.stream().room_bytes(bytes_of(request))[index_of(Tier::host)];
    }
  };
  memory_.stream().inspect([&](const Policy& policy) {
    for (std::uint32_t set = 0; set < chunk_sets_.size(); ++set) {
      const ChunkSet& chunks = chunk_sets_[set];
      for (const auto& id :
           {std::optional(chunks.parameter), chunks.gradient, chunks.master, chunks.momentum, chunks.variance}) {
        if (id) {
          const ChunkInfo& info = policy.chunk(*id).info();
          add({set, info.kind}, info.home);
        }
      }
    }
  });
  for (std::size_t i = 0; i < planned.size(); ++i) {
    add(planned[i], homes[i]);
  }
  return visits.empty() ? 0 : *std::max_element(visits.begin(), visits.end());
}

std::uint64_t SessionState::update_room(const SetInfo& info) const {
  const auto room = [&](Kind kind) {
    const std::uint64_t bytes = bytes_of(info, kind);
    return bytes == 0 ? 0 : memory_.stream().room_bytes(bytes)[index_of(Tier::host)];
  };
  std::uint64_t bytes = room(Kind::parameter);
  if (info.trainable) {
    bytes += room(Kind::gradient) + room(Kind::master) + room(Kind::momentum) + room(Kind::variance);
  }
  return bytes;
}

std::uint64_t SessionState::largest_update_room() const {
  std::uint64_t largest = 0;
  for (std::uint32_t set = 0; set < set_infos_.size(); ++set) {
    largest = std::max(largest, set_infos_[set].elements > 0 ? update_room(set_infos_[set]) : 0);
  }
  return largest;
}

void SessionState::keep_host_for_chunks() {
  const std::uint64_t resting = rested_[index_of(Tier::host)];
  const std::uint64_t updates = largest_update_room();
  spillable_.keep_from_blocks(resting, updates);
  if (activations_ != nullptr) {
    activations_->keep_from_host(resting + updates);
  }
}

void SessionState::check_room_to_work() {
  spillable_.leave_free(0);  // what is under construction elsewhere does not stand in the way
  std::uint64_t largest_on_device = 0;
  memory_.stream().inspect([&](const Policy& policy) {
    for (std::size_t at = 0; at < chunk_sets_.size(); ++at) {
      if (set_infos_[at].parameters == 0) {
        continue;
      }
      for (const auto& id : {std::optional(chunk_sets_[at].parameter), chunk_sets_[at].gradient}) {
        if (id && policy.chunk(*id).info().home != Tier::device) {
          largest_on_device = std::max(largest_on_device, policy.chunk(*id).info().room_bytes[index_of(Tier::device)]);
        }
      }
    }
  });
  const std::uint64_t largest_update = largest_visit_of_update({}, {});
  const Budget& host = memory_.budget(Tier::host);
  const std::uint64_t host_needed = rested_[index_of(Tier::host)] + host.used(Kind::other) + largest_update;
  if (host_needed > host.capacity()) {
    throw OutOfMemory("host: an update brings " + format_bytes(largest_update) + " of chunks to the host beside " +
                          format_bytes(rested_[index_of(Tier::host)]) + " that rest there and " +
                          format_bytes(host.used(Kind::other)) + " of staging and other use, in a budget of " +
                          format_bytes(host.capacity()),
                      host.hint_to_hold(host_needed) + ", lower placement.chunk, or let less rest on the host");
  }
  const Budget& device = memory_.budget(Tier::device);
  const std::uint64_t chunks_needed = rested_[index_of(Tier::device)] + largest_on_device;
  const std::uint64_t device_needed = chunks_needed + device.used(Kind::buffer);
  if (device_needed > device.capacity() || chunks_needed > memory_.plan().device_chunk_limit) {
    const bool limited = device_needed <= device.capacity();
    throw OutOfMemory("device: the largest chunk of " + format_bytes(largest_on_device) + " does not fit beside " +
                          format_bytes(rested_[index_of(Tier::device)]) + " of chunks that rest there and " +
                          format_bytes(device.used(Kind::buffer)) + " of buffers, in " +
                          (limited ? "device.chunks of " + format_bytes(memory_.plan().device_chunk_limit)
                                   : "device.memory of " + format_bytes(device.capacity())),
                      std::string("raise ") + (limited ? "device.chunks" : "device.memory") + " to at least " +
                          format_bytes_exactly(limited ? chunks_needed : device_needed) +
                          (limited ? "" : ", and more for activations") + ", or lower placement.chunk");
  }
  memory_.budget(Tier::host).need(host_needed);
  memory_.budget(Tier::device).need(device_needed);
}

}  // namespace terrace
