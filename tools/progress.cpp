#include "tools/progress.h"

#include <array>
#include <unistd.h>

#include "tools/text_table.h"

namespace terrace {
namespace {

constexpr double kMemory = 0.9;  // what a step leaves of the mean of those before it
constexpr double kLineSeconds = 5;
constexpr double kRewriteSeconds = 0.1;

}  // namespace

Progress::Progress(std::FILE* out, std::int64_t last_step)
    : out_(out), last_step_(last_step), terminal_(isatty(fileno(out)) == 1) {}

void Progress::show(const StepMetrics& metrics) {
  const bool first = step_seconds_ == 0;
  const auto mean = [&](double& value, double latest) {
    value = first ? latest : kMemory * value + (1 - kMemory) * latest;
  };
  mean(step_seconds_, metrics.seconds);
  mean(stall_seconds_, metrics.stall_seconds);
  mean(tokens_, static_cast<double>(metrics.tokens));

  const double interval = terminal_ ? kRewriteSeconds : kLineSeconds;
  if (!first && metrics.step < last_step_ && since_line_.elapsed_seconds() < interval) return;
  since_line_.restart();
  std::fprintf(out_, terminal_ ? "\r%s\x1b[K" : "%s\n", line(metrics).c_str());
  std::fflush(out_);
  open_ = terminal_;
}

void Progress::end() {
  if (open_) std::fputc('\n', out_);
  open_ = false;
}

std::string Progress::line(const StepMetrics& metrics) const {
  std::array<char, 200> text;
  std::snprintf(text.data(), text.size(), "step %lld/%lld  loss %.4f  %.0f tokens/s  stall %.0f%%  ETA %s",
                static_cast<long long>(metrics.step), static_cast<long long>(last_step_), metrics.loss,
                step_seconds_ > 0 ? tokens_ / step_seconds_ : 0.0,
                step_seconds_ > 0 ? 100 * stall_seconds_ / step_seconds_ : 0.0,
                format_duration(static_cast<double>(last_step_ - metrics.step) * step_seconds_).c_str());
  return text.data();
}

}  // namespace terrace
