/// What the command's exit code says.
#pragma once

#include <exception>
#include <string>

namespace terrace {

enum class ExitCode : int {
  done = 0,
  internal = 1,
  usage = 2,          ///< bad usage or configuration, missing or empty data
  out_of_memory = 3,  ///< a budget is too small
  io = 4,
  corrupt = 5,
  interrupted = 130,
};

struct Failure {
  ExitCode code;
  std::string message;  ///< with the hint
};

Failure failure_of(const std::exception_ptr& error);

}  // namespace terrace
