#include "tools/machine.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <unistd.h>

#include <nlohmann/json.hpp>

namespace terrace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return "";
}

std::uint64_t machine_memory_bytes() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

nlohmann::ordered_json machine_json(int threads) {
  nlohmann::ordered_json json;
  json["cpu"] = cpu_model();
  json["cores"] = sysconf(_SC_NPROCESSORS_ONLN);
  json["threads"] = threads;
  json["memory_bytes"] = machine_memory_bytes();
  return json;
}

}  // namespace terrace
