/// The memory that this process has mapped, and how much of it is the emulated device's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace terrace {

struct Mapping {
  std::uint64_t begin = 0;  ///< addresses
  std::uint64_t end = 0;
  std::uint64_t resident_bytes = 0;
  bool wants_huge_pages = false;   ///< they were asked for (the flag hg of proc_pid_smaps(5))
  bool wants_small_pages = false;  ///< for some time none were wanted (nh)
};

inline std::vector<Mapping> mappings_of_process() {
  std::ifstream lines("/proc/self/smaps");
  if (!lines) throw std::runtime_error("no /proc/self/smaps");
  std::vector<Mapping> mappings;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (!word.ends_with(':')) {
      std::size_t length = 0;
      const std::uint64_t begin = std::stoull(word, &length, 16);
      mappings.push_back({.begin = begin, .end = std::stoull(word.substr(length + 1), nullptr, 16)});
    } else if (word == "Rss:") {
      words >> mappings.back().resident_bytes;
      mappings.back().resident_bytes *= 1024;
    } else if (word == "VmFlags:") {
      while (words >> word) {
        mappings.back().wants_huge_pages = mappings.back().wants_huge_pages || word == "hg";
        mappings.back().wants_small_pages = mappings.back().wants_small_pages || word == "nh";
      }
    }
  }
  return mappings;
}

/// Bytes of the memory that page blocks are made of, as this process has them mapped: that for which huge pages were
/// asked, or for some time none. The C library's and a sanitizer's are others.
inline std::uint64_t pages_in_process() {
  constexpr std::uint64_t beyond_shadows = 0x7000'0000'0000;  // sanitizers want no huge pages for theirs either
  std::uint64_t bytes = 0;
  for (const Mapping& each : mappings_of_process()) {
    const bool is_of_blocks = each.wants_huge_pages || (each.wants_small_pages && each.begin >= beyond_shadows);
    bytes += is_of_blocks ? each.resident_bytes : 0;
  }
  return bytes;
}

}  // namespace terrace
