/// `terrace bench adam`: the optimizer's kernels against the memory traffic that they cannot do without.
#pragma once

#include <cstdint>
#include <vector>

namespace terrace {

struct BenchAdamOptions {
  /// Parameters of a case.
  std::vector<std::uint64_t> parameters{1ULL << 16U, 1ULL << 18U,  1ULL << 20U,  1ULL << 22U,
                                        1ULL << 24U, 48ULL << 20U, 256ULL << 20U};
  int rounds = 9;
  bool json = false;
};

/// Prints the table, or JSON. Returns false after Ctrl-C, having printed the cases that were measured. Throws
/// OutOfMemory where the machine has no room for the largest case.
bool bench_adam(const BenchAdamOptions& options);

}  // namespace terrace
