#include "optimizer/update_threads.h"

#include <algorithm>
#include <atomic>

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include "optimizer/standard_arithmetic.h"

namespace terrace {
namespace {

/// Tells who watches threads, and does not see into oneTBB, that a thread begins with what another has handed it.
std::atomic<unsigned> handed_over{0};

}  // namespace

struct UpdateThreads::Arena {
  explicit Arena(int count) : arena(count) {}

  oneapi::tbb::task_arena arena;
};

UpdateThreads::UpdateThreads(int count)
    : count_(std::clamp(count, 1, oneapi::tbb::info::default_concurrency())), arena_(std::make_unique<Arena>(count_)) {}

UpdateThreads::~UpdateThreads() = default;

void UpdateThreads::for_each(std::size_t parts, const std::function<void(std::size_t)>& part) const {
  std::atomic<std::size_t> next{0};  // part, for whoever is free
  std::atomic<int> ended{0};
  const auto take_parts = [&](int) {
    handed_over.load(std::memory_order_acquire);
    const StandardArithmetic standard;
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      part(i);
    }
    ended.fetch_add(1, std::memory_order_release);
  };
  const int takers = static_cast<int>(std::min(parts, static_cast<std::size_t>(count_)));
  if (takers <= 1) {
    take_parts(0);
    return;
  }
  const auto take_all = [&] {
    handed_over.load(std::memory_order_acquire);
    oneapi::tbb::parallel_for(0, takers, take_parts, oneapi::tbb::simple_partitioner());
  };
  handed_over.fetch_add(1, std::memory_order_release);
  arena_->arena.execute(take_all);
  ended.load(std::memory_order_acquire);
}

}  // namespace terrace
