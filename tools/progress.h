/// How far a run is, on standard error: loss, tokens a second, time left, what the tiers hold of their budgets, and the
/// share of time that compute waited and for what.
///
/// On a terminal one line that is written anew; elsewhere a line every few seconds and one for the last step.
#pragma once

#include <array>
#include <cstdint>

#include "base/clock.h"
#include "memory/stall.h"
#include "memory/usage.h"
#include "tools/metrics.h"
#include "tools/progress_line.h"
#include "tools/terminal.h"

namespace terrace {

class Progress {
 public:
  /// `last_step` is the number of the step after which the run ends; the budgets are those of `usage`.
  Progress(std::int64_t last_step, const MemoryUsage& usage);
  /// Leaves the line as it stands.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const StepMetrics& metrics);

 private:
  /// Takes a step into the recent means, in which later steps weigh more.
  void take(const StepMetrics& metrics);
  RunState state_after(const StepMetrics& metrics) const;

  const std::int64_t last_step_;
  std::array<std::uint64_t, tier_count> budgets_{};
  const bool terminal_;
  const Looks looks_;
  bool first_ = true;
  double step_seconds_ = 0;
  double tokens_ = 0;
  double stall_seconds_ = 0;
  std::array<double, stall_cause_count> stall_seconds_by_cause_{};
  Stopwatch since_line_;
};

}  // namespace terrace
