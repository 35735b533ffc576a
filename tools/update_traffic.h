/// The bytes that an update moves, without its arithmetic: what memory alone takes for them.
#pragma once

#include "optimizer/update_run.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// Reads and writes what an update of the run does, and changes none of it. What is beyond the last whole 64 elements
/// is left out. Gradients are of the parameters' type.
void pass_over(const UpdateRun& run, const UpdateThreads& threads);

}  // namespace terrace
