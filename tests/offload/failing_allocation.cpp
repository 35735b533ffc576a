#include "tests/offload/failing_allocation.h"

#include <cstdlib>
#include <new>

namespace terrace {
namespace {

constexpr int never = -1;
constinit thread_local int left_before_failure = never;

}  // namespace

FailingAllocation::FailingAllocation(int others_before) noexcept { left_before_failure = others_before; }
FailingAllocation::~FailingAllocation() { left_before_failure = never; }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool FailingAllocation::possible() noexcept { return false; }
#else
bool FailingAllocation::possible() noexcept { return true; }
#endif

}  // namespace terrace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(std::size_t bytes) {
  int& left = terrace::left_before_failure;
  if (left != terrace::never && left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif
