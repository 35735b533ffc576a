/// How far a run is, as one line: for a terminal, as wide as it is, and for a file.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "memory/stall.h"
#include "offload/tier.h"
#include "tools/terminal.h"

namespace terrace {

/// What a run shows of itself after a step.
struct RunState {
  std::int64_t step = 0;
  std::int64_t last_step = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double seconds_left = 0;
  std::array<std::optional<double>, tier_count> used{};  ///< share of each tier's budget; nothing: no such tier
  double stall_share = 0;                                ///< of the time
  std::optional<StallCause> main_stall;                  ///< what most of it was
};

/// At most `columns` wide: the least important parts go first.
std::string progress_line(const RunState& state, int columns, Looks looks);

/// The same, all of it, without colours and bars.
std::string progress_text(const RunState& state);

}  // namespace terrace
