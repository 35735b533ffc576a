/// `terrace bench step`: how long a step takes, against the floors under it and against plain LibTorch.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/case_runner.h"

namespace terrace {

struct BenchStepOptions : CaseOptions {
  std::filesystem::path nvme;  ///< where the stores go
};

/// The names of all cases, in their order.
std::vector<std::string> bench_step_cases();

/// Prints what it measures. False if it was interrupted; what was measured by then is printed. Throws ConfigError for
/// an unknown case, or one that needs a folder where none is given.
bool bench_step(const BenchStepOptions& options);

}  // namespace terrace
