/// What a session asks of LibTorch's CUDA part, which is a library of its own that need not be there.
///
/// The device is the first that CUDA shows, `cuda:0`. But for `load_cuda_program` nothing here is called where that has
/// given a reason.
#pragma once

#include <string>

#include "integration/program_memory.h"
#include "memory/pool_budget.h"

namespace terrace {

/// Has LibTorch's CUDA part loaded, where the program is not linked with it. Returns why LibTorch cannot compute on
/// CUDA, or nothing. Has to come before LibTorch is asked for the first time whether it can, as torch::manual_seed and
/// `backward` do: it remembers the answer.
std::string load_cuda_program();

/// The stream on which this thread issues LibTorch's ops.
void* current_cuda_stream();

/// LibTorch's allocator for the device. The first call puts one before it, for good, that forwards to it.
SegmentPool& cuda_pool();
/// The program's allocations on the device are counted by `budget` from now on, but for those under Pause. `memory`
/// hears of refusals before they are thrown as c10::OutOfMemoryError.
void attach_cuda_pool(PoolBudget& budget, ProgramMemory& memory);
/// From now on none is counted.
void detach_cuda_pool() noexcept;

}  // namespace terrace
