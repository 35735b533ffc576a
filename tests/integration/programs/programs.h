/// The programs of the table: loops and models that nobody wrote for Terrace.
#pragma once

#include <vector>

#include "tests/integration/programs/world.h"

namespace terrace::testing {

struct Program {
  const char* name;     ///< in the words of the promise
  const char* unusual;  ///< what is unusual about it
  void (*run)(World&);
  const char* refused_with = nullptr;  ///< part of the message, of the few that are refused
  bool recomputes = false;             ///< its blocks run again in backward
  bool wants_all = false;              ///< one op wants all parameters, so that only gradients ever have to leave
};

std::vector<Program> gradient_programs();
std::vector<Program> parameter_programs();
std::vector<Program> module_programs();
std::vector<Program> sequence_programs();
std::vector<Program> saved_tensor_programs();
std::vector<Program> loop_programs();

}  // namespace terrace::testing
