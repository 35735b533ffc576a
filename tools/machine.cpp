#include "tools/machine.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <unistd.h>

#include <nlohmann/json.hpp>

namespace terrace {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return "";
}

}  // namespace

nlohmann::ordered_json machine_json(int threads) {
  nlohmann::ordered_json json;
  json["cpu"] = cpu_model();
  json["cores"] = sysconf(_SC_NPROCESSORS_ONLN);
  json["threads"] = threads;
  json["memory_bytes"] =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return json;
}

}  // namespace terrace
