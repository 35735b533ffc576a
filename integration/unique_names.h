/// Names that are each given once: a name that is there already gets "#2" at its end, or "#3" and so on.
#pragma once

#include <string>
#include <unordered_set>

namespace terrace {

class UniqueNames {
 public:
  /// The name as it is from now on.
  std::string add(const std::string& name) {
    std::string unique = name;
    for (int count = 2; !names_.insert(unique).second; ++count) {
      unique = name + "#" + std::to_string(count);
    }
    return unique;
  }

 private:
  std::unordered_set<std::string> names_;
};

}  // namespace terrace
