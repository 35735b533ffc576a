/// Which tiers hold a copy of one chunk, and in which state.
///
/// Pure bookkeeping: no thread, clock, lock or memory behind it. Every copy that can be read holds the
/// newest bytes: a write supersedes the others at once. A step that the table does not list throws
/// LogicError and changes nothing.
///
///   step       from                       to         meaning
///   reserve    absent                     reserved   room is counted, bytes are not there
///   arrive     reserved                   arriving   a transfer or fill into it has started
///   arrived    arriving                   valid      and is done
///   failed     arriving                   reserved   and failed
///   supersede  valid                      reserved   newer bytes are elsewhere, or the bytes are dead
///   leave      valid                      leaving    a write-back has started, to give up the room after it
///   stay       leaving                    valid      wanted again, or the write-back failed
///   vacate     valid, leaving, reserved   absent     the room is given up
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "memory/chunk.h"

namespace terrace {

enum class CopyState : std::uint8_t { absent, reserved, arriving, valid, leaving };
enum class CopyStep : std::uint8_t { reserve, arrive, arrived, failed, supersede, leave, stay, vacate };

std::string_view name_of(CopyState state) noexcept;
std::string_view name_of(CopyStep step) noexcept;

/// The table above. Throws LogicError for a step it does not list.
CopyState next_state(CopyState state, CopyStep step);

class Residency {
 public:
  /// One tier's copy of the chunk.
  struct Copy {
    CopyState state = CopyState::absent;
    std::uint32_t pins = 0;           ///< holds on it by whoever reads or writes it
    std::uint32_t write_pins = 0;     ///< those of them that may change it
    std::uint32_t outgoing = 0;       ///< transfers that read it
    std::uint32_t failed_writes = 0;  ///< write-backs into it that failed in a row
    std::uint64_t last_use = 0;       ///< logical time, for eviction
    Tier source = Tier::device;       ///< while it arrives: where its bytes come from, or its own tier for a fill
    bool can_wait = false;            ///< while it arrives: nobody has waited for it yet

    bool readable() const noexcept { return state == CopyState::valid || state == CopyState::leaving; }
  };

  explicit Residency(const ChunkInfo& info) : info_(info) {}

  const ChunkInfo& info() const noexcept { return info_; }
  const Copy& at(Tier tier) const noexcept { return copies_[index_of(tier)]; }
  Copy& at(Tier tier) noexcept { return copies_[index_of(tier)]; }

  /// Moves the copy at `tier` along the table.
  void step(Tier tier, CopyStep step);

  /// Whether any copy holds the chunk's bytes; if none does it reads as it begins.
  bool has_bytes() const noexcept;
  /// Whether a tier on the way from `tier` home, or the home, holds the bytes too: the copy can be dropped, and the
  /// bytes do not come home by a longer way. So can one that is blank.
  bool is_spare(Tier tier) const noexcept;
  /// Whether a transfer or a reader (see Policy::next_reading) is at any copy.
  bool in_flight() const noexcept;
  /// Whether a copy on a tier other than `tier` is pinned.
  bool pinned_elsewhere(Tier tier) const noexcept;
  bool pinned() const noexcept;
  /// Whether a copy on a tier other than `tier` is being changed.
  bool changing_elsewhere(Tier tier) const noexcept;

  /// An update of the chunk is queued: its bytes are about to be superseded. Of a gradient it may be done: its bytes
  /// are of no more use, and are there until they are written or dead.
  enum class Update : std::uint8_t { none, queued, done };
  Update update = Update::none;
  /// Its bytes are those it began with: nothing is lost when every copy is dropped.
  bool blank = false;
  /// As long as no other copy holds its bytes, that on the device stays until an update wants it, or its room is wanted
  /// at once.
  bool waits_for_update = false;
  /// It is on its way from the device to NVMe and leaves the host as soon as it is there.
  bool passes_host = false;
  std::uint64_t writes = 0;  ///< accesses that may have changed its bytes, so far
  /// Somebody is to read it on the host as soon as it comes there with more writes than that.
  std::optional<std::uint64_t> read_after_writes;
  bool being_read = false;  ///< so it stays there as it is until then

  bool is_to_be_read() const noexcept { return read_after_writes && writes > *read_after_writes; }
  /// Of an activation: what had its place in the last pass had to leave the device before it was read, and so will
  /// this.
  bool is_expected_to_leave = false;
  bool had_to_leave = false;  ///< and it itself had to
  /// The bytes are dead once nobody uses them: see Policy::discard.
  bool discard_when_idle = false;
  /// And so is the chunk: see Policy::remove.
  bool removed = false;

 private:
  ChunkInfo info_;
  std::array<Copy, tier_count> copies_;
};

}  // namespace terrace
