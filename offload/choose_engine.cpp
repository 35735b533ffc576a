#include "offload/choose_engine.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "base/fallback.h"
#include "offload/thread_engine.h"
#include "offload/uring_engine.h"

namespace terrace {
namespace {

std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> decorator;

std::unique_ptr<IoEngine> make_plain_engine(std::string_view choice, const Processors& processors) {
  if (choice == "threads") return std::make_unique<ThreadEngine>(processors);
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
  note_fallback("nvme: threads read and write instead of io_uring", why_not);
  return std::make_unique<ThreadEngine>(processors);
}

}  // namespace

std::unique_ptr<IoEngine> make_io_engine(std::string_view choice, const Processors& processors) {
  std::unique_ptr<IoEngine> engine = make_plain_engine(choice, processors);
  return decorator ? decorator(std::move(engine)) : std::move(engine);
}

void decorate_io_engines(std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> decorate) {
  decorator = std::move(decorate);
}

}  // namespace terrace
