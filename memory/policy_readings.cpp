// What somebody beside the program reads on the host: chunks on their way there, and those that come for it.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "memory/policy.h"

namespace terrace {
namespace {

/// Chunks for which the host keeps room while some are to be read there on arrival. Found by trying: with none or one,
/// steps whose parameters come by the host as well take 2 to 6% longer; with more they move more from NVMe.
constexpr std::uint64_t passing_to_be_read = 2;

}  // namespace

void Policy::arrived_on_host(ChunkId id) {
  const Residency& chunk = chunks_[id];
  const bool waits_to_write = chunk.at(Tier::host).write_pins > 0 || chunk.changing_elsewhere(Tier::host);
  const bool is_to_be_read = chunk.is_to_be_read() && chunk.at(Tier::host).readable() && !waits_to_write;
  if (!(chunk.waits_for_update && is_to_be_read)) {  // what waits on the device is here for its reader alone
    end_passing(id);
  }
  if (is_to_be_read) {
    start_reading(id);
  }
}

void Policy::end_passing(ChunkId id) {
  const Residency& chunk = chunks_[id];
  if (!stop_passing(id) || chunk.pinned() || !can_leave(id, Tier::host)) {
    return;
  }
  if (chunk.waits_for_update && chunk.at(Tier::device).state == CopyState::valid) {
    vacate(id, Tier::host);
  } else {
    evict(id, Tier::host, TransferPriority::write_back);
  }
}

void Policy::leave_if_unread(ChunkId id, Tier tier) {
  const Residency& chunk = chunks_[id];
  const Residency::Copy& copy = chunk.at(tier);
  if (copy.state == CopyState::leaving && copy.outgoing == 0 && !(tier == Tier::host && chunk.being_read)) {
    count_not_leaving(chunk.info(), tier);
    vacate(id, tier);
    plan_again(id, tier);
  }
}

void Policy::set_read_on_arrival(ChunkId id, bool wanted) {
  forget_reading(id);
  withdraw_reading(id);
  Residency& chunk = chunks_.at(id);
  if (wanted && !chunk.removed) {
    chunk.read_after_writes = chunk.writes;
    if (chunk.info().home == Tier::nvme) {
      ++unread_;
      unread_room_ = std::max(unread_room_, chunk.info().room_bytes[index_of(Tier::host)]);
    }
  }
  advance();
}

void Policy::forget_reading(ChunkId id) {
  const bool was_wanted = std::exchange(chunks_.at(id).read_after_writes, std::nullopt).has_value();
  if (was_wanted && chunks_[id].info().home == Tier::nvme && --unread_ == 0) {
    unread_room_ = 0;
  }
  if (was_wanted) {  // others may have the room that was kept for it
    lanes_[index_of(Tier::host)].ahead_is_full = false;
    is_settled_ = false;
  }
}

void Policy::start_reading(ChunkId id) {
  forget_reading(id);
  chunks_[id].being_read = true;
  ++under_reading_;
  readings_.push_back(id);
}

void Policy::reading_done(ChunkId id) {
  if (!chunks_.at(id).being_read) {
    throw LogicError("policy: " + describe(chunks_[id].info()) + " was read, which was not to be");
  }
  end_reading(id);
  advance();
}

void Policy::end_reading(ChunkId id) {
  chunks_[id].being_read = false;
  --under_reading_;
  is_settled_ = false;
  lanes_[index_of(Tier::host)].ahead_is_full = false;
  leave_if_unread(id, Tier::host);
  drop_if_dead(id);
  end_passing(id);
}

void Policy::withdraw_reading(ChunkId id) {
  if (std::erase(readings_, id) > 0) {
    end_reading(id);
  }
}

std::uint64_t Policy::room_kept_to_read() const noexcept {
  const std::uint64_t kept = std::min(unread_, passing_to_be_read) * unread_room_;
  return kept - std::min(kept, coming_free_on_host());
}

bool Policy::has_room_made_to_read(ChunkId id) {
  const Rooms rooms = rooms_of(chunks_[id].info(), Tier::host);
  while (coming_free_on_host() == 0 || shortage(Tier::host, rooms).bytes > passing_bytes_) {
    const std::optional<ChunkId> other = victim(Tier::host, std::nullopt, false);
    if (!other || lanes_[index_of(Tier::host)].short_of_room) {
      return false;
    }
    evict(*other, Tier::host, TransferPriority::write_back);
  }
  return true;
}

}  // namespace terrace
