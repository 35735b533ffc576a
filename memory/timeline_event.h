/// What a timeline is made of: events of a fixed size. Times are those of `monotonic_ns`, sizes bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "memory/stall.h"
#include "offload/tier.h"
#include "offload/transfer.h"

namespace terrace {

/// A chunk as events name it.
struct ChunkName {
  Kind kind = Kind::parameter;
  std::uint32_t index = 0;
};

/// A thread of the program waited.
struct StallEvent {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  const char* op;  ///< lives for ever; "" outside ops
  std::optional<ChunkName> chunk;
  StallCause cause;
};

struct StepEvent {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::uint64_t number;  ///< the session's first is 1
};

/// Follows each step: what there had been in all by its end, also of what the timeline does not hold any more.
struct StepTotals {
  std::int64_t stall_ns = 0;
  std::array<std::uint64_t, link_count> bytes_moved{};
};

/// A set of chunks was updated, or (without one) the norm of all gradients, or a part of it, found.
struct UpdateEvent {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::optional<std::uint32_t> set;
};

/// From now on so much of a tier is used by a kind. Those of one sample have the same time.
struct UsageEvent {
  std::int64_t at_ns;
  std::uint64_t bytes;
  std::uint64_t tier_peak;  ///< the most that the tier was used, by all kinds, since the sample before
  Tier tier;
  Kind kind;
};

using TimelineEvent = std::variant<TransferRecord, StallEvent, StepEvent, StepTotals, UpdateEvent, UsageEvent>;

using UsageByKind = std::array<std::array<std::uint64_t, kind_count>, tier_count>;

/// What a timeline holds at one moment.
struct TimelineSnapshot {
  std::int64_t origin_ns = 0;          ///< when it began
  std::int64_t complete_since_ns = 0;  ///< whatever ended after this is in it
  std::uint64_t dropped = 0;           ///< events that it does not hold any more
  std::array<std::uint64_t, tier_count> budgets{};
  UsageByKind usage{};                ///< before the first event
  std::vector<TimelineEvent> events;  ///< in the order in which they were recorded: by their ends
};

}  // namespace terrace
