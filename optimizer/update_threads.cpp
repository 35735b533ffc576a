#include "optimizer/update_threads.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include "optimizer/standard_arithmetic.h"

namespace terrace {
namespace {

/// Tells who watches threads, and does not see into oneTBB, that a thread begins with what another has handed it.
std::atomic<unsigned> handed_over{0};

/// Whether this thread is in a call of `for_each`. Another caller's part may come to it there.
constinit thread_local bool is_caller = false;

/// That oneTBB runs, with the one that calls.
int most_threads() {
  using Control = oneapi::tbb::global_control;
  return static_cast<int>(Control::active_value(Control::max_allowed_parallelism));
}

class Caller {
 public:
  Caller() noexcept : before_(std::exchange(is_caller, true)) {}
  ~Caller() { is_caller = before_; }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

 private:
  const bool before_;
};

}  // namespace

struct UpdateThreads::Arena {
  explicit Arena(int count) : arena(count) {}

  oneapi::tbb::task_arena arena;
};

UpdateThreads::UpdateThreads(int count, Processors processors)
    : count_(std::clamp(count, 1, most_threads())),
      processors_(std::move(processors)),
      arena_(std::make_unique<Arena>(count_)) {}

UpdateThreads::~UpdateThreads() = default;

void UpdateThreads::for_each(std::size_t parts, const std::function<void(std::size_t)>& part) const {
  // Whoever is free takes neighbours, fewer the fewer are left (guided self-scheduling: Polychronopoulos and Kuck,
  // 1987). Threads then walk memory far from each other, which moves it up to a fifth faster than side by side, and end
  // together nevertheless where parts are about alike.
  const Caller caller;
  const std::size_t takers = std::min(parts, static_cast<std::size_t>(count_));
  std::atomic<std::size_t> next{0};  // part
  std::atomic<int> ended{0};
  const auto take_parts = [&](std::size_t) {
    handed_over.load(std::memory_order_acquire);
    // For no longer than this: who uses the thread next is none of ours. Leaving the arena, which an observer would be
    // told of, may be later than its end.
    std::optional<BoundThread> bound;
    if (!is_caller) {
      bound.emplace(processors_);
    }
    const StandardArithmetic standard;
    std::size_t first = next.load(std::memory_order_relaxed);
    while (first < parts) {
      const std::size_t end = first + std::max<std::size_t>(1, (parts - first) / (2 * takers));
      if (!next.compare_exchange_weak(first, end, std::memory_order_relaxed)) {
        continue;
      }
      for (std::size_t i = first; i < end; ++i) {
        part(i);
      }
      first = next.load(std::memory_order_relaxed);
    }
    bound.reset();
    ended.fetch_add(1, std::memory_order_release);
  };
  if (takers <= 1) {
    take_parts(0);
    return;
  }
  const auto take_all = [&] {
    handed_over.load(std::memory_order_acquire);
    oneapi::tbb::parallel_for(std::size_t{0}, takers, take_parts, oneapi::tbb::simple_partitioner());
  };
  handed_over.fetch_add(1, std::memory_order_release);
  arena_->arena.execute(take_all);
  ended.load(std::memory_order_acquire);
}

}  // namespace terrace
