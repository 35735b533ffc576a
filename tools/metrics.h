/// What is measured, and the file that gets one JSON object a step.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "memory/usage.h"

namespace terrace {

struct StepMetrics {
  std::int64_t step = 0;  ///< the first is 1
  double loss = 0;        ///< mean over the micro-batches, in nats
  double learning_rate = 0;
  std::optional<double> gradient_norm;  ///< before clipping; nothing where nobody needs it
  std::int64_t tokens = 0;              ///< of this step
  double seconds = 0;
  double stall_seconds = 0;  ///< of this step: the sum by cause
  std::array<double, stall_cause_count> stall_seconds_by_cause{};
  double update_seconds = 0;                            ///< of this step, by the program's own thread
  std::array<std::uint64_t, tier_count> peak_bytes{};   ///< of this step
  std::array<std::uint64_t, link_count> bytes_moved{};  ///< in this step

  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

/// How well a model predicts bytes that it has not learnt.
struct HeldOut {
  double loss = 0;          ///< mean, in nats
  double byte_entropy = 0;  ///< of the same bytes: the loss of a model that knows only how often each occurs
  std::int64_t bytes = 0;
};

/// One line of JSON, without the line's end. Numbers keep all their bits.
std::string to_json(const StepMetrics& metrics);

/// Replaces the file, but for its lines of the steps up to `kept_steps`, where a run goes on; where it lacks some of
/// them, because their disk was full or it is another file, the log says so. Each object is on disk's way when `write`
/// returns, so that a run can be watched. Throws IoError, naming the path.
class MetricsFile {
 public:
  explicit MetricsFile(std::filesystem::path path, std::int64_t kept_steps = 0);
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

/// Writes a whole file. Throws IoError, naming the path.
void write_file(const std::filesystem::path& path, const std::string& text);

}  // namespace terrace
