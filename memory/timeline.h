/// What moved, what waited and what was used at each moment of a session, as far back as its memory reaches.
///
/// A ring of events in memory that is reserved once; the oldest go first. What is used is sampled whenever something is
/// recorded, and now and then while chunks and tensors come and go; between two samples the highest use is known.
///
///     session.timeline().write("timeline.json");   // for ui.perfetto.dev or chrome://tracing
///
/// Thread-safe. Recording allocates nothing, and takes one mutex for a moment; without memory it does nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/timeline_event.h"
#include "offload/budget.h"
#include "offload/transfer.h"

namespace terrace {

class Timeline final : public TransferObserver {
 public:
  /// Holds a few samples of everything.
  static constexpr std::uint64_t least_bytes = 16 * 1024;

  /// Keeps what fits `bytes`, which the caller has counted; nothing where they are 0. The budgets are those of the
  /// tiers, and outlive it; no other timeline samples them. Throws LogicError for less than `least_bytes`.
  Timeline(std::uint64_t bytes, std::array<Budget*, tier_count> budgets);

  bool keeps_events() const noexcept { return capacity_ > 0; }

  void on_transfer(const TransferRecord& record) noexcept override;
  /// The calling thread has waited, in the op that it is in.
  void record_stall(StallCause cause, std::int64_t begin_ns, std::int64_t end_ns,
                    std::optional<ChunkName> chunk) noexcept;
  void record_update(std::int64_t begin_ns, std::int64_t end_ns, std::optional<std::uint32_t> set) noexcept;
  /// The first step begins here, and not with the timeline; nothing once it has begun.
  void begin_first_step() noexcept;
  /// A step has ended, with these totals, and the next began.
  void end_step(std::int64_t end_ns, const StepTotals& totals) noexcept;
  /// Samples what is used, if it was not a moment ago.
  void sample_if_due() noexcept;

  /// Copies what there is, with a last sample.
  TimelineSnapshot snapshot();

  /// Writes what there is as a trace of Chrome's format (see timeline_trace.h). Throws IoError, and LogicError where
  /// nothing is kept.
  void write(const std::filesystem::path& path);

 private:
  using Lock = std::lock_guard<std::mutex>;

  void record(const TimelineEvent& event) noexcept;
  void sample(const Lock& lock) noexcept;
  void sample(Tier tier, std::int64_t now_ns, const Lock& lock) noexcept;
  void push(const TimelineEvent& event, const Lock& lock) noexcept;
  /// Drops the oldest event, with the totals of a step and the rest of a sample.
  void drop_oldest(const Lock& lock) noexcept;
  void forget(const TimelineEvent& event) noexcept;

  const std::size_t capacity_;  ///< events
  const std::array<Budget*, tier_count> budgets_;
  const std::int64_t origin_ns_;
  std::atomic<std::int64_t> next_sample_ns_{0};

  std::mutex mutex_;
  std::vector<TimelineEvent> ring_;  ///< grows to the capacity, within what was reserved
  std::size_t oldest_ = 0;
  std::size_t count_ = 0;
  std::uint64_t dropped_ = 0;
  std::int64_t complete_since_ns_;
  UsageByKind usage_before_{};  ///< the oldest event
  UsageByKind usage_now_{};     ///< as last sampled
  std::uint64_t steps_ = 0;     ///< that have ended
  std::int64_t step_began_ns_;
  bool first_step_began_ = false;
};

}  // namespace terrace
