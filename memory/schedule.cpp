#include "memory/schedule.h"

#include <algorithm>
#include <utility>

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

Schedule::Schedule(std::vector<Entry> entries, bool ends_with_step)
    : entries_(std::move(entries)), ends_with_step_(ends_with_step) {
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

std::list<ScheduleBook::Known>::iterator ScheduleBook::find(Key key) {
  return std::find_if(known_.begin(), known_.end(), [&](const Known& each) { return each.key == key; });
}

std::list<ScheduleBook::Known>::const_iterator ScheduleBook::find(Key key) const {
  return std::find_if(known_.begin(), known_.end(), [&](const Known& each) { return each.key == key; });
}

bool ScheduleBook::begin_pass(Key key, End end, std::optional<ChunkId> first) {
  const bool begins_elsewhere = first && first_ && first != first_ && !recording_.empty();
  if (has_begun_ && (key == key_ || begins_elsewhere)) {
    if (end == End::step) {
      expect_step();
    }
    return false;
  }
  note_follower(key);
  if (key != key_) {
    // What came between a step and the pass that follows is of neither.
    has_begun_ ? keep_recording(false) : forget_recording();
    key_ = key;
    if (const auto known = find(key); known != known_.end()) {
      known_.splice(known_.begin(), known_, known);
    }
  }
  end_ = end;
  first_ = first;
  has_begun_ = true;
  return true;
}

void ScheduleBook::expect_step() {
  end_ = End::step;
  is_as_known_ = false;
}

void ScheduleBook::end_step() {
  keep_recording(true);
  ended_step_ = key_;
  const auto ended = find(key_);
  key_ = ended == known_.end() ? key_ : ended->follower.value_or(key_);
  end_ = End::step;
  has_begun_ = false;
}

void ScheduleBook::note_follower(Key key) {
  const auto step = ended_step_ ? find(*ended_step_) : known_.end();
  ended_step_.reset();
  if (step == known_.end()) {
    return;
  }
  const bool is_another = step->follower && step->follower != key;
  if (!is_another || std::exchange(step->is_follower_in_doubt, true)) {
    step->follower = key;
    step->is_follower_in_doubt = false;
  }
}

ScheduleBook::Progress ScheduleBook::record_change(const ChunkAccess& access, std::uint64_t program_bytes) {
  Progress progress = Progress::goes_on;
  if (recording_.empty() || recording_.back().chunk != access.chunk) {
    const bool begins_anew = end_ == End::repetition && !recording_.empty() &&
                             recording_.front().chunk == access.chunk && (is_as_known_ || has_repeated());
    if (begins_anew || recording_.size() == most_entries) {
      keep_recording(false);
      progress = Progress::was_over;
    }
    add_entry(access, program_bytes);
  } else {
    add_to_last_entry(access, program_bytes);
  }
  if (is_as_known_) {
    const Schedule& known = find(key_)->schedule;
    if (recording_.back().accesses == known[known.size() - 1].accesses) {
      keep_recording(false);
      progress = Progress::is_over;
    }
  }
  return progress;
}

void ScheduleBook::add_entry(const ChunkAccess& access, std::uint64_t program_bytes) {
  const std::size_t position = recording_.size();
  recording_.push_back({access.chunk, access.mode, program_bytes});
  std::uint32_t border = position == 0 ? 0 : borders_.back();
  while (border > 0 && recording_[border].chunk != access.chunk) {
    border = borders_[border - 1];
  }
  borders_.push_back(position > 0 && recording_[border].chunk == access.chunk ? border + 1 : 0);
  is_as_known_ = false;
  if (end_ == End::repetition && as_known_ == position) {
    const auto known = find(key_);
    const bool is_same =
        known != known_.end() && position < known->schedule.size() && known->schedule[position].chunk == access.chunk;
    as_known_ += is_same ? 1 : 0;
    is_as_known_ = is_same && as_known_ == known->schedule.size();
  }
}

const Schedule* ScheduleBook::current() const {
  if (const auto known = find(key_); known != known_.end()) {
    return &known->schedule;
  }
  return known_.empty() ? nullptr : &known_.front().schedule;
}

void ScheduleBook::keep_recording(bool ends_with_step) {
  if (recording_.empty()) {
    return;
  }
  const std::size_t period = recording_.size() - borders_.back();
  const std::size_t times = recording_.size() / period;
  const bool is_cut_short = recording_.size() == most_entries;
  if (is_cut_short && times == 1) {
    forget_recording();
    return;
  }
  if (is_cut_short || (end_ == End::repetition && has_repeated())) {
    // The latest is the most like what is to come.
    const auto end = recording_.begin() + static_cast<std::ptrdiff_t>(times * period);
    recording_ = std::vector(end - static_cast<std::ptrdiff_t>(period), end);
  }
  const auto known = find(key_);
  // Before the other goes, so that who follows that one can tell the two apart by their address.
  Known& fresh = known_.emplace_front(Known{.key = key_, .schedule = Schedule(std::move(recording_), ends_with_step)});
  if (known != known_.end()) {
    fresh.follower = known->follower;
    fresh.is_follower_in_doubt = known->is_follower_in_doubt;
    known_.erase(known);
  } else if (known_.size() > most_schedules) {
    known_.pop_back();
  }
  forget_recording();
}

void ScheduleBook::forget_recording() {
  recording_.clear();
  borders_.clear();
  as_known_ = 0;
  is_as_known_ = false;
}

}  // namespace terrace
