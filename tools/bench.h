/// `terrace bench step`: how long a step takes, against the floors under it and against plain LibTorch.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace terrace {

/// Fewer pairs are a first look.
inline constexpr int pairs_of_a_figure = 30;

struct BenchStepOptions {
  std::vector<std::string> cases;  ///< by name; none: all
  int pairs = pairs_of_a_figure;   ///< doubled while the verdict is open, but for a first look
  std::filesystem::path nvme;      ///< where the stores go
  bool json = false;
};

/// The names of all cases, in their order.
std::vector<std::string> bench_step_cases();

/// Prints what it measures. False if it was interrupted; what was measured by then is printed. Throws ConfigError for
/// an unknown case, or one that needs a folder where none is given.
bool bench_step(const BenchStepOptions& options);

}  // namespace terrace
