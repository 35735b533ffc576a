// Why a request waits.
#include <algorithm>

#include "memory/policy.h"

namespace terrace {
namespace {

StallCause room_on(Tier tier) noexcept {
  switch (tier) {
    case Tier::device:
      return StallCause::device_room;
    case Tier::host:
      return StallCause::host_room;
    case Tier::nvme:
      break;
  }
  return StallCause::nvme_room;
}

StallCause on_the_way(Tier from, Tier to) noexcept {
  if (from == to) {
    return StallCause::host_to_device;  // begun, by the thread of that link
  }
  switch (from) {
    case Tier::device:
      return StallCause::device_to_host;
    case Tier::host:
      return to == Tier::nvme ? StallCause::host_room : StallCause::host_to_device;  // to NVMe, so as to leave the host
    case Tier::nvme:
      break;
  }
  return StallCause::nvme_to_host;
}

}  // namespace

std::optional<Tier> Policy::arrival_awaited(const ChunkAccess& access) const {
  const Residency& chunk = chunks_[access.chunk];
  const auto arrives = [&](Tier tier) { return chunk.at(tier).state == CopyState::arriving; };
  if (arrives(access.tier)) {
    return access.tier;
  }
  // Where it comes by the host, that is where it arrives first; and nobody may read a copy that is to change.
  const bool comes_later = access.tier == Tier::device && comes_by_host(access.chunk);
  if (!comes_later && !chunk.at(access.tier).readable()) {
    return std::nullopt;
  }
  const auto* const found = std::find_if(all_tiers.begin(), all_tiers.end(), arrives);
  return found == all_tiers.end() ? std::nullopt : std::optional(*found);
}

Wait Policy::wait_of(const Request& request) const {
  const auto is_there = [&](const ChunkAccess& access) {
    const Residency& chunk = chunks_[access.chunk];
    return chunk.at(access.tier).readable() && (access.mode == Access::read || !chunk.in_flight());
  };
  const auto missing = std::find_if_not(request.accesses.begin(), request.accesses.end(), is_there);
  const bool is_missing = missing != request.accesses.end();
  if (is_missing) {
    if (const auto to = arrival_awaited(*missing)) {
      return {on_the_way(chunks_[missing->chunk].at(*to).source, *to), missing->chunk};
    }
    if (chunks_[missing->chunk].being_read && chunks_[missing->chunk].at(missing->tier).readable()) {
      return {StallCause::update, missing->chunk};
    }
  }
  const Tier lane = lane_of(request);
  if (const auto& queue = lanes_[index_of(lane)].queue; !queue.empty() && queue.front() != &request) {
    return wait_of(*queue.front());
  }
  return is_missing ? Wait{room_on(missing->tier), missing->chunk} : Wait{room_on(lane), std::nullopt};
}

}  // namespace terrace
