/// The engine that a test is to run with, without a decorator.
#pragma once

#include <memory>
#include <string>

#include "offload/thread_engine.h"
#include "offload/uring_engine.h"

namespace terrace {

inline std::unique_ptr<IoEngine> make_engine(const std::string& name) {
  if (name == "io_uring") return std::make_unique<UringEngine>();
  return std::make_unique<ThreadEngine>();
}

}  // namespace terrace
