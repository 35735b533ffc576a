/// The bytes that an update moves, without its arithmetic: what memory alone takes for them.
#pragma once

#include "optimizer/update_run.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// Reads and writes what an update of the run does, and changes none of it. What is beyond the last whole 64 elements
/// is left out. The run has a variance, gradients of the parameters' type or fp32, and arrays that begin at multiples
/// of 8 B.
void pass_over(const UpdateRun& run, const UpdateThreads& threads);

}  // namespace terrace
