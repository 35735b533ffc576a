// The future: what is brought ahead of need and written back early.
#include <algorithm>

#include "memory/policy.h"

namespace terrace {

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

void Policy::set_update_queued(std::span<const ChunkId> chunks, bool queued) {
  Lane& lane = lanes_[index_of(Tier::device)];
  for (const ChunkId chunk : chunks) {
    chunks_.at(chunk).update_queued = queued;
    if (!queued && lane.forecast.schedule() != nullptr) {
      lane.planned = std::min(lane.planned,
                              lane.forecast.schedule()->next_use(chunk, lane.forecast.cursor()).value_or(lane.planned));
    }
  }
  if (!queued) {
    advance();
  }
}

void Policy::look_ahead_again(Tier tier) {
  lanes_[index_of(tier)].planned = lanes_[index_of(tier)].forecast.cursor();
  lanes_[index_of(tier)].ahead_is_full = false;
}

void Policy::look_ahead(Tier tier) {
  Lane& lane = lanes_[index_of(tier)];
  const Schedule* schedule = lane.forecast.schedule();
  if (schedule == nullptr || lane.short_of_room || lane.ahead_is_full) {
    return;
  }
  // Updates are alike, so the host looks around the end of one into the next. What the device will want next is about
  // to be updated by then.
  const std::size_t cursor = lane.forecast.cursor();
  const std::size_t end = schedule->size() + (tier == Tier::host ? cursor : 0);
  for (lane.planned = std::max(lane.planned, cursor); lane.planned < end; ++lane.planned) {
    if (lane.ahead >= prefetch_depth_) {
      return;
    }
    const ChunkId id = (*schedule)[lane.planned % schedule->size()].chunk;
    Residency& chunk = chunks_[id];
    const CopyState state = chunk.at(tier).state;
    const bool wanted_here = state == CopyState::absent || state == CopyState::reserved;
    if (!wanted_here || !chunk.has_bytes() || chunk.discard_when_idle || chunk.changing_elsewhere(tier) ||
        (tier == Tier::device && chunk.update_queued)) {
      continue;
    }
    if (state == CopyState::absent && !take_room_ahead(id, tier, lane.planned)) {
      lane.ahead_is_full = true;
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

}  // namespace terrace
