/// What a training run did, for people and for machines.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "memory/usage.h"
#include "tools/account.h"
#include "tools/metrics.h"
#include "tools/terminal.h"

namespace terrace {

/// The format of what `to_json(Report)` gives; it goes up when a field changes its meaning.
inline constexpr int report_version = 1;

/// The last checkpoint that a run saved.
struct SavedCheckpoint {
  std::string folder;
  std::int64_t step = 0;
  double seconds = 0;  ///< that saving it took
};

struct Report {
  bool managed = true;
  bool interrupted = false;
  std::int64_t parameters = 0;
  std::uint64_t state_bytes = 0;
  std::int64_t steps = 0;          ///< done, by this run and those that it goes on with
  std::int64_t resumed_after = 0;  ///< of these, by runs before
  std::int64_t planned_steps = 0;
  std::int64_t skipped_steps = 0;  ///< of this run's, as their gradients were not finite
  std::int64_t tokens = 0;
  double build_seconds = 0;  ///< that the model took to be built, before the first step
  double seconds = 0;        ///< of all steps
  double stall_seconds = 0;
  std::array<double, stall_cause_count> stall_seconds_by_cause{};
  double update_seconds = 0;  ///< by the program's own thread
  double loss = 0;            ///< of the last step
  std::optional<HeldOut> held_out;
  std::optional<std::string> sample;
  std::optional<SavedCheckpoint> checkpoint;
  int threads = 1;                                   ///< that compute used
  std::optional<std::uint64_t> peak_resident_bytes;  ///< that the process held at one time, whatever they were for
  bool device_is_emulated = true;
  MemoryUsage usage;
  std::array<std::uint64_t, link_count> moved_in_steps{};  ///< bytes; what came after the last step moved more
  std::optional<Account> account;                          ///< where managed and a step was made

  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

/// The run in a few lines, the held-out loss, the sample, tables of memory and of what moved, and where the time went.
std::string to_text(const Report& report, Looks looks = {});

/// One object: `version`, `machine`, and `cases` with one case, "train".
std::string to_json(const Report& report);

}  // namespace terrace
