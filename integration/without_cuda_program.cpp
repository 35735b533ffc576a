// What stands in for cuda_program.cpp in a build without CUDA.

#include "base/error.h"
#include "integration/cuda_program.h"

namespace terrace {
namespace {

constexpr const char* no_cuda = "this build has no CUDA (configure with the preset cuda)";

}  // namespace

std::string load_cuda_program() { return no_cuda; }

void* current_cuda_stream() { throw LogicError(no_cuda); }

SegmentPool& cuda_pool() { throw LogicError(no_cuda); }

void attach_cuda_pool(PoolBudget& /*budget*/, ProgramMemory& /*memory*/) { throw LogicError(no_cuda); }

void detach_cuda_pool() noexcept {}

}  // namespace terrace
