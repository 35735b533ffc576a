#include "tools/progress.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>

#include "base/status_line.h"

namespace terrace {
namespace {

constexpr double kMemory = 0.9;  // what a step leaves of the mean of those before it
constexpr double kLineSeconds = 5;
constexpr double kRewriteSeconds = 0.1;
constexpr double kShownStall = 0.005;  // of the time; less reads 0%
constexpr int kMargin = 2;             // columns: a "^C" that the terminal shows does not wrap

}  // namespace

Progress::Progress(std::int64_t last_step, const MemoryUsage& usage)
    : last_step_(last_step), terminal_(is_terminal(stderr)), looks_(looks_of(stderr)) {
  for (const Tier tier : all_tiers) budgets_[index_of(tier)] = usage.capacity(tier);
}

Progress::~Progress() {
  if (terminal_) end_status_line();
}

void Progress::show(const StepMetrics& metrics) {
  const bool first = first_;
  take(metrics);
  const double interval = terminal_ ? kRewriteSeconds : kLineSeconds;
  if (!first && metrics.step < last_step_ && since_line_.elapsed_seconds() < interval) return;
  since_line_.restart();
  const RunState state = state_after(metrics);
  if (terminal_) {
    show_status_line(progress_line(state, columns_of(stderr) - kMargin, looks_));
  } else {
    std::fputs((progress_text(state) + "\n").c_str(), stderr);
  }
}

void Progress::take(const StepMetrics& metrics) {
  const auto mean = [&](double& value, double latest) {
    value = first_ ? latest : kMemory * value + (1 - kMemory) * latest;
  };
  mean(step_seconds_, metrics.seconds);
  mean(tokens_, static_cast<double>(metrics.tokens));
  mean(stall_seconds_, metrics.stall_seconds);
  for (std::size_t cause = 0; cause < stall_cause_count; ++cause) {
    mean(stall_seconds_by_cause_[cause], metrics.stall_seconds_by_cause[cause]);
  }
  first_ = false;
}

RunState Progress::state_after(const StepMetrics& metrics) const {
  RunState state;
  state.step = metrics.step;
  state.last_step = last_step_;
  state.loss = metrics.loss;
  state.seconds_left = static_cast<double>(last_step_ - metrics.step) * step_seconds_;
  for (const Tier tier : all_tiers) {
    const std::uint64_t budget = budgets_[index_of(tier)];
    if (budget > 0) {
      state.used[index_of(tier)] =
          static_cast<double>(metrics.peak_bytes[index_of(tier)]) / static_cast<double>(budget);
    }
  }
  if (step_seconds_ > 0) {
    state.tokens_per_second = tokens_ / step_seconds_;
    state.stall_share = stall_seconds_ / step_seconds_;
  }
  const auto main = std::max_element(stall_seconds_by_cause_.begin(), stall_seconds_by_cause_.end());
  if (state.stall_share >= kShownStall && *main > 0) {
    state.main_stall = all_stall_causes[static_cast<std::size_t>(main - stall_seconds_by_cause_.begin())];
  }
  return state;
}

}  // namespace terrace
