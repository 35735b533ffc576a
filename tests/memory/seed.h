/// The seed of a random test: another one in each run, printed, and repeated by TERRACE_TEST_SEED.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace terrace {

inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("TERRACE_TEST_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  }();
  std::cout << "seed " << seed << " (TERRACE_TEST_SEED repeats it)\n";
  return seed;
}

}  // namespace terrace
