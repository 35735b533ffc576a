/// What is known of the program's future: the accesses of a pass as they were recorded the last time.
///
/// A pass is a stretch of the program that repeats: a training step, or an evaluation. Passes are told apart by a key
/// that the caller gives when one begins (training or not, shapes of the input), and the last record of each of the
/// latest few keys is kept. A step ends by a mark, and is taken to be followed by what followed its like before, as a
/// processor takes a branch (Smith, A Study of Branch Prediction Strategies, 1981). An evaluation has no mark: it is
/// over when its accesses begin to repeat. What runs without a graph between other accesses, such as the forward of an
/// operator that a program has defined itself, is of the pass it is in. A cursor follows the program through the record
/// of the pass that runs; where the program does something else the cursor stays until the two meet again.
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
  /// `ends_with_step`: what is updated is made anew at its end.
  explicit Schedule(std::vector<Entry> entries, bool ends_with_step = false);

  std::size_t size() const noexcept { return entries_.size(); }
  bool ends_with_step() const noexcept { return ends_with_step_; }
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
  bool ends_with_step_ = false;
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
  /// And written.
  bool written_again(ChunkId chunk) const {
    return schedule_ != nullptr && ((in_use(chunk) && (*schedule_)[cursor_ - 1].mode == Access::write) ||
                                    schedule_->next_write(chunk, cursor_).has_value());
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
  /// What a pass ends with, if no other begins before.
  enum class End : std::uint8_t { step, repetition };
  /// What an access tells of the pass that runs: that it goes on, that it was over before this access, which is the
  /// next one's first, or that it is over with it.
  enum class Progress : std::uint8_t { goes_on, was_over, is_over };

  /// A pass in which the chunk changes more often is not recorded whole. Where it repeats one stretch (micro-batches,
  /// or a program that never ends a step), that stretch is taken for it; if not, nothing is known of it.
  static constexpr std::size_t most_entries = 128 * 1024;

  /// Another pass begins, or the same goes on: if its key is the same, or if `first`, the chunk to be used next, is not
  /// the one that it began with. Where either of the two ends with a step it does. Returns whether another began.
  bool begin_pass(Key key, End end = End::step, std::optional<ChunkId> first = std::nullopt);
  /// The pass that runs ends with a step, whatever was said when it began.
  void expect_step();
  /// The step ends; until told otherwise the next pass is taken to be the one that followed such a one before.
  void end_step();
  /// What `current` gave before is no more if the pass is over.
  Progress record(const ChunkAccess& access, std::uint64_t program_bytes) {
    if (!recording_.empty() && recording_.back().chunk == access.chunk && !is_as_known_) {
      add_to_last_entry(access, program_bytes);  // as most are
      return Progress::goes_on;
    }
    return record_change(access, program_bytes);
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
  struct Known {
    Key key = 0;
    Schedule schedule;
    std::optional<Key> follower{};      ///< of a step
    bool is_follower_in_doubt = false;  ///< it was another one the last time
  };

  std::list<Known>::iterator find(Key key);
  std::list<Known>::const_iterator find(Key key) const;
  void note_follower(Key key);
  void add_to_last_entry(const ChunkAccess& access, std::uint64_t program_bytes) {
    Schedule::Entry& last = recording_.back();
    last.program_bytes = std::max(last.program_bytes, program_bytes);
    last.mode = std::max(last.mode, access.mode);
    ++last.accesses;
  }
  Progress record_change(const ChunkAccess& access, std::uint64_t program_bytes);
  void add_entry(const ChunkAccess& access, std::uint64_t program_bytes);
  /// Whether what is recorded is one stretch twice.
  bool has_repeated() const { return !recording_.empty() && 2 * borders_.back() == recording_.size(); }
  /// Keeps what is recorded, or of what repeats a stretch the last one.
  void keep_recording(bool ends_with_step);
  void forget_recording();

  static constexpr std::size_t most_schedules = 8;

  std::list<Known> known_;  ///< latest first; addresses are stable
  Key key_ = 0;
  End end_ = End::step;
  std::optional<ChunkId> first_;   ///< what the pass began with, where that is known
  bool has_begun_ = false;         ///< the pass that runs, rather than being taken for the next
  std::optional<Key> ended_step_;  ///< of which the follower is not known yet
  std::vector<Schedule::Entry> recording_;
  /// By entry, how many chunks at the beginning of the recording are the same as as many up to this entry, but for all
  /// of them: the failure function of Knuth, Morris and Pratt (1977). By it a repetition is seen at once.
  std::vector<std::uint32_t> borders_;
  std::size_t as_known_ = 0;  ///< entries at the beginning of the recording that are those of the last time
  /// All of that time's, and no more: the pass is over, but for accesses in a row to the last chunk. False where passes
  /// end with a step.
  bool is_as_known_ = false;
};

}  // namespace terrace
