/// `terrace bench link`: how fast bytes cross between host and device, each way alone and both at once.
#pragma once

#include <cstdint>

#include "base/config.h"

namespace terrace {

struct BenchLinkOptions {
  Config::Device device;
  std::uint64_t bytes = std::uint64_t{1} << 30U;  ///< a measurement copies each way
  bool json = false;
};

/// Copies through the device's own queues, from memory that is pinned and, inwards, from memory that is not. Prints
/// what it measures: the best of three; of the emulated device also whether its link keeps the rates that it is given.
/// Returns false after Ctrl-C, having printed what was measured. Throws ConfigError where there is no such device,
/// OutOfMemory where a block of 32 MiB each way finds no room.
bool bench_link(const BenchLinkOptions& options);

}  // namespace terrace
