/// What is known of the program's future: the accesses of a pass as they were recorded the last time.
///
/// A pass is a stretch of the program that repeats: a training step, or an evaluation. Passes are told apart by a key
/// that the caller gives when one begins (training or not, shapes of the input), and the last record of each of the
/// latest few keys is kept. A cursor follows the program through the record of the pass that runs; where the program
/// does something else the cursor stays until the two meet again.
///
/// Pure and not thread-safe: it belongs to the policy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "memory/chunk.h"

namespace terrace {

/// A sequence of accesses, and where in it each chunk is used.
class Schedule {
 public:
  struct Entry {
    ChunkId chunk = 0;
    Access mode = Access::read;
    /// The most bytes that the program's own tensors took on the device up to the next entry.
    std::uint64_t program_bytes = 0;
    /// How many accesses in a row this stands for.
    std::uint32_t accesses = 1;
  };

  Schedule() = default;
  explicit Schedule(std::vector<Entry> entries);

  std::size_t size() const noexcept { return entries_.size(); }
  const Entry& operator[](std::size_t position) const { return entries_[position]; }
  /// The first use of the chunk at or after `from`.
  std::optional<std::size_t> next_use(ChunkId chunk, std::size_t from) const;
  /// The first of them that writes.
  std::optional<std::size_t> next_write(ChunkId chunk, std::size_t from) const;
  /// When the chunk that is used at `position` is used again, around the end.
  std::size_t next_use_after(std::size_t position) const;
  /// The most program bytes of any entry in [from, to].
  std::uint64_t program_peak(std::size_t from, std::size_t to) const;

 private:
  std::vector<Entry> entries_;
  std::vector<std::vector<std::size_t>> uses_;    ///< by chunk
  std::vector<std::vector<std::size_t>> writes_;  ///< of those
  std::vector<std::uint64_t> block_peaks_;
};

/// A schedule and how far the program has come in it.
class Forecast {
 public:
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  void follow(const Schedule* schedule) {
    schedule_ = schedule;
    cursor_ = 0;
    seen_ = 0;
    suspected_.reset();
  }
  const Schedule* schedule() const noexcept { return schedule_; }
  std::size_t cursor() const noexcept { return cursor_; }

  /// The program uses the chunk now.
  void advance(ChunkId chunk);

  /// Where the chunk is used next, counted from the beginning of this pass around its end into the next one.
  std::optional<std::size_t> next_use(ChunkId chunk) const;
  /// How many entries from now that is; 0 while accesses of the latest are left.
  std::uint64_t distance(ChunkId chunk) const {
    const auto use = next_use(chunk);
    return !use ? never : *use < cursor_ ? 0 : *use - cursor_;
  }
  /// How many entries from now it is written.
  std::uint64_t distance_of_write(ChunkId chunk) const;
  /// Whether it is used again before the end of the pass. False where nothing is known.
  bool used_again(ChunkId chunk) const {
    return schedule_ != nullptr && (in_use(chunk) || schedule_->next_use(chunk, cursor_).has_value());
  }

 private:
  /// Whether the latest entry is the chunk's and stands for more accesses than were seen.
  bool in_use(ChunkId chunk) const {
    return cursor_ > 0 && (*schedule_)[cursor_ - 1].chunk == chunk && seen_ < (*schedule_)[cursor_ - 1].accesses;
  }

  const Schedule* schedule_ = nullptr;
  std::size_t cursor_ = 0;
  std::uint32_t seen_ = 0;                ///< accesses of the entry before the cursor
  std::optional<std::size_t> suspected_;  ///< where the program may have jumped to, if its next access agrees
};

/// Records passes and finds them again.
class ScheduleBook {
 public:
  using Key = std::uint64_t;

  /// Another pass begins, or the same goes on if its key is the same.
  void begin_pass(Key key);
  /// The step ends; until told otherwise the next pass is taken to be like this one.
  void end_step();
  void record(const ChunkAccess& access, std::uint64_t program_bytes) {
    if (recording_.empty() || recording_.back().chunk != access.chunk) {
      recording_.push_back({access.chunk, access.mode, program_bytes});
      return;
    }
    Schedule::Entry& last = recording_.back();
    last.program_bytes = std::max(last.program_bytes, program_bytes);
    last.mode = std::max(last.mode, access.mode);
    ++last.accesses;
  }
  /// The program's own tensors took this much since the last record.
  void note_program_bytes(std::uint64_t program_bytes) {
    if (!recording_.empty()) {
      recording_.back().program_bytes = std::max(recording_.back().program_bytes, program_bytes);
    }
  }

  /// What the pass that runs was like the last time; if it is new, what the latest was like. Null if there was none.
  const Schedule* current() const;

 private:
  void keep_recording();

  static constexpr std::size_t most_schedules = 8;

  std::list<std::pair<Key, Schedule>> known_;  // latest first; addresses are stable
  Key key_ = 0;
  std::vector<Schedule::Entry> recording_;
};

}  // namespace terrace
