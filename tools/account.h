/// Where a run's time went, what bounded it, and the setting that would help most.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/config.h"
#include "memory/usage.h"

namespace terrace {

/// What an account is made from.
struct RunFacts {
  Config config;
  double seconds = 0;         ///< of all steps
  double update_seconds = 0;  ///< of these, in which the program's own thread updated
  std::array<double, stall_cause_count> stall_seconds_by_cause{};
  MemoryUsage usage;
  std::array<std::uint64_t, tier_count> spare_bytes{};  ///< that the machine has for a larger budget of each tier
  int threads = 1;                                      ///< that compute uses
  int cores = 1;
};

struct Account {
  double seconds = 0;
  double computation_seconds = 0;  ///< forward, backward, and what else is none of these:
  double update_seconds = 0;
  std::array<double, stall_cause_count> stall_seconds_by_cause{};
  std::string bound;       ///< "computation", or the name of a cause
  std::string reason;      ///< "34% of the time was spent waiting for bytes from NVMe"
  std::string suggestion;  ///< what would help; empty where nothing of the configuration would

  /// Of the time, from 0 to 1.
  double share_of(double part) const { return seconds > 0 ? part / seconds : 0; }
};

/// Computation is the bound while the rest is little; otherwise what takes the most of the rest. A wait for an update
/// and an update by the program's own thread count as one. Suggested is only what can help: no larger budget for a tier
/// that was not full, or that the machine has no room for.
Account account_of(const RunFacts& facts);

}  // namespace terrace
