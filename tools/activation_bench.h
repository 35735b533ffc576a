/// `terrace bench activations`: what becomes of the activations of a model that does not fit, and what that costs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace terrace {

struct BenchActivationsOptions {
  std::filesystem::path folder;    ///< on the drive that activations may go to
  std::vector<std::string> cases;  ///< by name; empty: all
  int rounds = 30;                 ///< from 30 on doubled while a verdict is open
  bool json = false;
};

std::vector<std::string> bench_activations_cases();

/// Runs the cases and prints what they measured. Returns false if it was interrupted, after printing. Throws
/// ConfigError for a case that there is not, and what a session throws.
bool bench_activations(const BenchActivationsOptions& options);

}  // namespace terrace
