/// `terrace bench update`: the update of a model whose states rest on NVMe, alone and behind computation.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tools/case_runner.h"

namespace terrace {

/// With fewer the host would have room for much of the states.
inline constexpr std::int64_t bench_update_fewest_layers = 8;

struct BenchUpdateOptions : CaseOptions {
  std::filesystem::path folder;  ///< where the store goes
  std::int64_t layers = 24;      ///< of the model, each of 3.2M parameters
};

/// The names of all cases, in their order.
std::vector<std::string> bench_update_cases();

/// Prints what it measures. False if it was interrupted; what was measured by then is printed. Throws ConfigError for
/// an unknown case, OutOfMemory or IoError where memory or the drive has no room for the model.
bool bench_update(const BenchUpdateOptions& options);

}  // namespace terrace
