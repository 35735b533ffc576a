#include "optimizer/state_format.h"

#include <string>

#include "base/error.h"

namespace terrace {

StateFormat state_format(std::string_view name) {
  if (name == "float32") {
    return StateFormat::float32;
  }
  if (name == "split") {
    return StateFormat::split;
  }
  if (name == "split_bfloat16") {
    return StateFormat::split_bfloat16;
  }
  throw ConfigError("optimizer: there are no states \"" + std::string(name) + "\"",
                    "choose \"float32\", \"split\" or \"split_bfloat16\"");
}

}  // namespace terrace
