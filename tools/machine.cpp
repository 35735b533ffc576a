#include "tools/machine.h"

#include <nlohmann/json.hpp>

#include "base/machine.h"

namespace terrace {

nlohmann::ordered_json machine_json(int threads) {
  nlohmann::ordered_json json;
  json["cpu"] = cpu_model();
  json["cores"] = machine_threads();
  json["threads"] = threads;
  json["memory_bytes"] = machine_memory_bytes();
  return json;
}

}  // namespace terrace
