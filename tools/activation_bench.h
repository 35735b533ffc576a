/// `terrace bench activations`: what becomes of the activations of a model that does not fit, and what that costs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/case_runner.h"

namespace terrace {

struct BenchActivationsOptions : CaseOptions {
  std::filesystem::path folder;  ///< on the drive that activations may go to
};

/// The names of all cases, in their order.
std::vector<std::string> bench_activations_cases();

/// Runs the cases and prints what they measured. Returns false if it was interrupted, after printing. Throws
/// ConfigError for a case that there is not, and what a session throws.
bool bench_activations(const BenchActivationsOptions& options);

}  // namespace terrace
