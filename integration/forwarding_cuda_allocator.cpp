#include "integration/forwarding_cuda_allocator.h"

#include <algorithm>
#include <bit>
#include <exception>

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "base/error.h"
#include "integration/pause.h"

namespace terrace {
namespace {

namespace caching = c10::CachingAllocator;

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// The block that LibTorch looks for, or a larger one: it may be told to round up to parts of powers of two.
std::uint64_t rounded(std::uint64_t bytes) {
  const std::uint64_t block = round_up(std::max<std::uint64_t>(bytes, 1), caching::kMinBlockSize);
  const std::size_t divisions = caching::AcceleratorAllocatorConfig::roundup_power2_divisions(bytes);
  return divisions > 1 ? std::bit_ceil(block) : block;
}

}  // namespace

std::uint64_t ForwardingCudaAllocator::most_growth(std::uint64_t bytes) {
  const std::uint64_t block = rounded(bytes);
  const std::uint64_t large_segment = caching::AcceleratorAllocatorConfig::large_segment_size();
  if (block <= caching::kSmallSize) {
    return caching::kSmallBuffer;
  }
  if (caching::AcceleratorAllocatorConfig::use_expandable_segments()) {
    return round_up(block, large_segment);
  }
  return block < caching::kMinLargeAlloc ? std::max(large_segment, round_up(block, caching::kRoundLarge))
                                         : round_up(block, caching::kRoundLarge);
}

std::uint64_t ForwardingCudaAllocator::kept_block_needed(std::uint64_t bytes) {
  const std::uint64_t block = rounded(bytes);
  // A free block may be too large for a request, or lie in a segment of another kind, where LibTorch is told so.
  const bool splits_any = caching::AcceleratorAllocatorConfig::max_split_size() == ~std::size_t{0};
  if (block <= caching::kSmallSize || !splits_any) {
    return 0;
  }
  return std::max<std::uint64_t>(block, caching::kSmallBuffer + 1);
}

std::uint64_t ForwardingCudaAllocator::Pool::reserved_bytes() {
  constexpr auto all = static_cast<std::size_t>(caching::StatType::AGGREGATE);
  return static_cast<std::uint64_t>(to_.getDeviceStats(device_).reserved_bytes[all].current);
}

std::uint64_t ForwardingCudaAllocator::Pool::largest_kept_bytes() {
  std::size_t largest = 1;  // where it is 0 LibTorch begins with what is free on the device
  to_.cacheInfo(device_, &largest);
  return largest;
}

void ForwardingCudaAllocator::attach(PoolBudget& budget, ProgramMemory& memory) noexcept {
  memory_.store(&memory, std::memory_order_relaxed);
  budget_.store(&budget, std::memory_order_release);
}

template <class Call>
auto ForwardingCudaAllocator::counted(std::size_t bytes, const cudaStream_t* stream, Call&& call) -> decltype(call()) {
  PoolBudget* const budget = budget_.load(std::memory_order_acquire);
  if (budget == nullptr || bytes == 0 || c10::cuda::current_device() != counted_) {
    return call();
  }
  if (Pause::active()) {
    return budget->call_uncounted(call);
  }
  try {
    const cudaStream_t on = stream != nullptr ? *stream : c10::cuda::getCurrentCUDAStream(counted_).stream();
    return budget->call({.most_growth = most_growth(bytes),
                         .kept_block_needed = keeps_blocks_ ? kept_block_needed(bytes) : 0,
                         .stream = on},
                        call);
  } catch (const Error& error) {
    memory_.load(std::memory_order_relaxed)->refused(std::current_exception());
    TORCH_CHECK_WITH(OutOfMemoryError, false, "terrace: ", error.what());
  }
}

c10::DataPtr ForwardingCudaAllocator::allocate(std::size_t bytes) {
  return counted(bytes, nullptr, [&] { return to_.allocate(bytes); });
}

void* ForwardingCudaAllocator::raw_alloc(std::size_t bytes) {
  return counted(bytes, nullptr, [&] { return to_.raw_alloc(bytes); });
}

void* ForwardingCudaAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  return counted(bytes, &stream, [&] { return to_.raw_alloc_with_stream(bytes, stream); });
}

}  // namespace terrace
