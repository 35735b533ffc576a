// What a session asks of CUDA and of LibTorch's CUDA part, in software: in place of offload's loaded_cuda_driver.cpp
// and integration's cuda_program.cpp.

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "base/error.h"
#include "integration/cuda_program.h"
#include "integration/pause.h"
#include "offload/loaded_cuda_driver.h"
#include "tests/integration/software_cuda/software_torch_cuda.h"

namespace terrace {
namespace {

constexpr std::uint64_t segment_unit = 64 * 1024;

std::uint64_t segment_for(std::uint64_t bytes) { return (bytes + segment_unit - 1) / segment_unit * segment_unit; }

/// Every block is a segment of its own, which is kept for another that is no larger.
class Pool final : public SegmentPool {
 public:
  std::uint64_t reserved_bytes() override {
    const std::scoped_lock lock(mutex_);
    return reserved_;
  }
  std::uint64_t largest_kept_bytes() override {
    const std::scoped_lock lock(mutex_);
    return kept_.empty() ? 0 : kept_.rbegin()->first;
  }
  void give_back_kept() override {
    const std::scoped_lock lock(mutex_);
    for (const auto& [bytes, block] : kept_) {
      std::free(block);
      testing::software_cuda()->give_back_beside(bytes);
      reserved_ -= bytes;
    }
    kept_.clear();
  }

  void* take(std::uint64_t bytes) {
    const std::scoped_lock lock(mutex_);
    const auto kept = kept_.lower_bound(segment_for(bytes));
    if (kept != kept_.end()) {
      void* const block = kept->second;
      used_.emplace(block, kept->first);
      kept_.erase(kept);
      return block;
    }
    testing::software_cuda()->take_beside(segment_for(bytes));
    void* const block = std::aligned_alloc(512, segment_for(bytes));
    used_.emplace(block, segment_for(bytes));
    reserved_ += segment_for(bytes);
    return block;
  }
  void give_back(void* block) {
    const std::scoped_lock lock(mutex_);
    const auto used = used_.find(block);
    kept_.emplace(used->second, block);
    used_.erase(used);
  }

 private:
  std::mutex mutex_;
  std::uint64_t reserved_ = 0;
  std::map<void*, std::uint64_t> used_;
  std::multimap<std::uint64_t, void*> kept_;
};

/// Lives until the process exits, as tensors may.
Pool& pool() {
  static auto& all = *new Pool;
  return all;
}

void give_back(void* block) {
  if (block != nullptr) pool().give_back(block);
}

std::atomic<PoolBudget*> attached_budget{nullptr};
std::atomic<ProgramMemory*> attached_memory{nullptr};

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const block = bytes > 0 ? counted(bytes) : nullptr;
    return {block, block, &terrace::give_back, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void* counted(std::size_t bytes) {
    const auto take = [&] { return pool().take(bytes); };
    PoolBudget* const budget = attached_budget.load();
    if (budget == nullptr) {
      return take();
    }
    if (Pause::active()) {
      return budget->call_uncounted(take);
    }
    try {
      return budget->call({.most_growth = segment_for(bytes), .kept_block_needed = segment_for(bytes)}, take);
    } catch (const Error& error) {
      attached_memory.load()->refused(std::current_exception());
      TORCH_CHECK_WITH(OutOfMemoryError, false, "terrace: ", error.what());
    }
  }
};

const bool is_installed = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, new Allocator);
  return true;
}();

}  // namespace

std::shared_ptr<CudaDriver> load_cuda_driver(std::string* /*why_not*/) { return testing::software_cuda(); }

std::string load_cuda_program() { return {}; }

void* current_cuda_stream() { return nullptr; }

SegmentPool& cuda_pool() { return pool(); }

void attach_cuda_pool(PoolBudget& budget, ProgramMemory& memory) {
  attached_memory = &memory;
  attached_budget = &budget;
}

void detach_cuda_pool() noexcept { attached_budget = nullptr; }

namespace testing {

std::shared_ptr<SoftwareCuda> software_cuda() {
  // Tensors and sessions may end after it would.
  static const auto& driver = *new std::shared_ptr<SoftwareCuda>(
      std::make_shared<SoftwareCuda>(SoftwareCuda::Options{.memory_bytes = std::uint64_t{1} << 30U}));
  return driver;
}

std::uint64_t pool_bytes() { return pool().reserved_bytes(); }

}  // namespace testing
}  // namespace terrace
