#include "memory/schedule.h"

#include <algorithm>

namespace terrace {
namespace {

/// Entries under one maximum, for `program_peak`.
constexpr std::size_t block_entries = 64;
/// A use this near is where the program is; one further away has to be confirmed by the next access.
constexpr std::size_t sure_distance = 32;

/// The first at or after `from` of positions that are in order.
std::optional<std::size_t> first_from(const std::vector<std::size_t>& positions, std::size_t from) {
  const auto next = std::lower_bound(positions.begin(), positions.end(), from);
  return next == positions.end() ? std::nullopt : std::optional(*next);
}

}  // namespace

Schedule::Schedule(std::vector<Entry> entries) : entries_(std::move(entries)) {
  for (std::size_t position = 0; position < entries_.size(); ++position) {
    const ChunkId chunk = entries_[position].chunk;
    uses_.resize(std::max<std::size_t>(uses_.size(), std::size_t{chunk} + 1));
    uses_[chunk].push_back(position);
    if (entries_[position].mode == Access::write) {
      writes_.resize(std::max<std::size_t>(writes_.size(), std::size_t{chunk} + 1));
      writes_[chunk].push_back(position);
    }
    if (position % block_entries == 0) {
      block_peaks_.push_back(0);
    }
    block_peaks_.back() = std::max(block_peaks_.back(), entries_[position].program_bytes);
  }
}

std::optional<std::size_t> Schedule::next_use(ChunkId chunk, std::size_t from) const {
  return chunk < uses_.size() ? first_from(uses_[chunk], from) : std::nullopt;
}

std::optional<std::size_t> Schedule::next_write(ChunkId chunk, std::size_t from) const {
  return chunk < writes_.size() ? first_from(writes_[chunk], from) : std::nullopt;
}

std::size_t Schedule::next_use_after(std::size_t position) const {
  const std::vector<std::size_t>& uses = uses_[entries_[position].chunk];
  return first_from(uses, position + 1).value_or(size() + uses.front());
}

std::uint64_t Schedule::program_peak(std::size_t from, std::size_t to) const {
  std::uint64_t peak = 0;
  const std::size_t end = std::min(to + 1, entries_.size());
  while (from < end) {
    if (from % block_entries == 0 && from + block_entries <= end) {
      peak = std::max(peak, block_peaks_[from / block_entries]);
      from += block_entries;
    } else {
      peak = std::max(peak, entries_[from++].program_bytes);
    }
  }
  return peak;
}

void Forecast::advance(ChunkId chunk) {
  if (schedule_ == nullptr) {
    return;
  }
  // An access that the record joins with the one before it is no step ahead.
  const auto next = schedule_->next_use(chunk, cursor_ > 0 ? cursor_ - 1 : 0);
  const auto is_near = [&](std::size_t from) {
    const auto use = schedule_->next_use(chunk, from);
    return use && *use < from + sure_distance ? use : std::nullopt;
  };
  if (next && *next < cursor_ + sure_distance) {
    seen_ = *next < cursor_ ? seen_ + 1 : 1;
    cursor_ = *next + 1;
    suspected_.reset();
  } else if (suspected_ && is_near(*suspected_)) {
    seen_ = 1;
    cursor_ = *is_near(*suspected_) + 1;
    suspected_.reset();
  } else {
    // The program has jumped ahead, or back: the pass may have begun anew.
    const auto any = next ? next : schedule_->next_use(chunk, 0);
    suspected_ = any ? std::optional(*any + 1) : std::nullopt;
  }
}

std::optional<std::size_t> Forecast::next_use(ChunkId chunk) const {
  if (schedule_ == nullptr) {
    return std::nullopt;
  }
  if (in_use(chunk)) {
    return cursor_ - 1;
  }
  if (const auto use = schedule_->next_use(chunk, cursor_)) {
    return use;
  }
  const auto use = schedule_->next_use(chunk, 0);
  return use ? std::optional(schedule_->size() + *use) : std::nullopt;
}

std::uint64_t Forecast::distance_of_write(ChunkId chunk) const {
  if (schedule_ == nullptr) {
    return never;
  }
  if (const auto position = schedule_->next_write(chunk, cursor_)) {
    return *position - cursor_;
  }
  const auto position = schedule_->next_write(chunk, 0);
  return position ? schedule_->size() + *position - cursor_ : never;
}

void ScheduleBook::begin_pass(Key key) {
  if (key == key_) {
    return;
  }
  keep_recording();
  key_ = key;
  const auto known = std::find_if(known_.begin(), known_.end(), [&](const auto& entry) { return entry.first == key; });
  if (known != known_.end()) {
    known_.splice(known_.begin(), known_, known);
  }
}

void ScheduleBook::end_step() { keep_recording(); }

const Schedule* ScheduleBook::current() const {
  const auto known = std::find_if(known_.begin(), known_.end(), [&](const auto& entry) { return entry.first == key_; });
  if (known != known_.end()) {
    return &known->second;
  }
  return known_.empty() ? nullptr : &known_.front().second;
}

void ScheduleBook::keep_recording() {
  if (recording_.empty()) {
    return;
  }
  const auto known = std::find_if(known_.begin(), known_.end(), [&](const auto& entry) { return entry.first == key_; });
  // Before the other goes, so that who follows that one can tell the two apart by their address.
  known_.emplace_front(key_, Schedule(std::move(recording_)));
  recording_.clear();
  if (known != known_.end()) {
    known_.erase(known);
  } else if (known_.size() > most_schedules) {
    known_.pop_back();
  }
}

}  // namespace terrace
