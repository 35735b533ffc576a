#include "offload/choose_engine.h"

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "offload/thread_engine.h"
#include "offload/uring_engine.h"

namespace terrace {

std::unique_ptr<IoEngine> make_io_engine(std::string_view choice) {
  if (choice == "threads") {
    return std::make_unique<ThreadEngine>();
  }
  std::string why_not;
  if (UringEngine::available(&why_not)) {
    return std::make_unique<UringEngine>();
  }
  if (choice == "io_uring") {
    throw ConfigError("io.engine: io_uring is not available: " + why_not, "set io.engine to \"auto\" or \"threads\"");
  }
  log_once("io.engine", LogLevel::warning,
           "io: no io_uring (" + why_not + "); NVMe I/O runs on threads, which costs more");
  return std::make_unique<ThreadEngine>();
}

}  // namespace terrace
