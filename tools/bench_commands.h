/// `terrace bench ...`: what each bench takes on the command line.
#pragma once

#include <vector>

#include "tools/subcommand.h"

namespace terrace {

/// Adds them to `bench`.
std::vector<Subcommand> add_bench_commands(CLI::App& bench);

}  // namespace terrace
