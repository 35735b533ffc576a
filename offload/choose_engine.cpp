#include "offload/choose_engine.h"

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "offload/thread_engine.h"
#include "offload/uring_engine.h"

namespace terrace {

std::unique_ptr<IoEngine> make_io_engine(std::string_view choice) {
  if (choice == "threads") return std::make_unique<ThreadEngine>();
  if (choice != "auto" && choice != "io_uring") {
    throw ConfigError("nvme: there is no I/O engine \"" + std::string(choice) + "\"",
                      "choose auto, io_uring or threads");
  }
  std::string why_not;
  if (UringEngine::available(&why_not)) return std::make_unique<UringEngine>();
  if (choice == "io_uring") {
    throw ConfigError("nvme: io_uring is not available: " + why_not,
                      "choose the I/O engine threads, or allow io_uring (sysctl kernel.io_uring_disabled, or the "
                      "container's seccomp profile)");
  }
  log_once("nvme.io_engine", LogLevel::warning,
           "nvme: io_uring is not available: " + why_not + "; threads read and write instead");
  return std::make_unique<ThreadEngine>();
}

}  // namespace terrace
