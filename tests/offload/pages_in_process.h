/// How much of the emulated device's memory this process has before it.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace terrace {

/// Bytes of the memory that page blocks are made of, as this process has them mapped: that for which huge pages were
/// asked, or for some time none (the flags hg and nh of proc_pid_smaps(5)). The C library's and a sanitizer's are
/// others.
inline std::uint64_t pages_in_process() {
  std::ifstream mappings("/proc/self/smaps");
  if (!mappings) throw std::runtime_error("no /proc/self/smaps");
  constexpr std::uint64_t beyond_shadows = 0x7000'0000'0000;  // sanitizers want no huge pages for theirs either
  std::uint64_t kib = 0;
  std::uint64_t begin = 0;
  std::uint64_t of_mapping = 0;
  for (std::string line; std::getline(mappings, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (!word.ends_with(':')) {  // a mapping's range
      begin = std::stoull(word, nullptr, 16);
    } else if (word == "Rss:") {
      words >> of_mapping;
    } else if (word == "VmFlags:") {
      while (words >> word) kib += word == "hg" || (word == "nh" && begin >= beyond_shadows) ? of_mapping : 0;
    }
  }
  return kib * 1024;
}

}  // namespace terrace
