/// How far a run is: loss, tokens a second, time left and the share of time that compute waited.
///
/// On a terminal one line that is rewritten; elsewhere a line every few seconds and one for the last step.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "base/clock.h"
#include "tools/metrics.h"

namespace terrace {

class Progress {
 public:
  /// `last_step` is the number of the step after which the run ends.
  Progress(std::FILE* out, std::int64_t last_step);
  ~Progress() { end(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const StepMetrics& metrics);

  /// Leaves the rewritten line as it stands, so that what follows starts on one of its own.
  void end();

 private:
  std::string line(const StepMetrics& metrics) const;

  std::FILE* out_;
  std::int64_t last_step_;
  bool terminal_;
  bool open_ = false;        // the cursor is behind the rewritten line
  double step_seconds_ = 0;  // recent means, later steps weighing more
  double stall_seconds_ = 0;
  double tokens_ = 0;
  Stopwatch since_line_;
};

}  // namespace terrace
