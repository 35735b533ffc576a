/// What this program was built of, and what it runs on.
#pragma once

#include <string>

namespace terrace {

struct BuildInfo {
  std::string terrace;
  std::string libtorch;
  std::string compiler;  ///< "GCC 12.2.0"
  bool cuda = false;     ///< whether the CUDA device is in it
  std::string liburing;
  std::string kernel;  ///< that runs now: "Linux 6.1.0"
};

BuildInfo build_info();

}  // namespace terrace
