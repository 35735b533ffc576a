#include "base/machine.h"

#include <algorithm>
#include <fstream>
#include <unistd.h>

namespace terrace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return "";
}

std::int64_t machine_threads() { return ::sysconf(_SC_NPROCESSORS_ONLN); }

std::uint64_t machine_memory_bytes() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace terrace
