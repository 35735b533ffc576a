/// How much of the emulated device's memory this process has before it.
#pragma once

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

namespace terrace {

/// Bytes of the memory that page blocks are made of, as this process has them mapped, with all that is anonymous
/// besides.
inline std::uint64_t pages_in_process() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssAnon:") {
      std::uint64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  throw std::runtime_error("no RssAnon in /proc/self/status");
}

}  // namespace terrace
