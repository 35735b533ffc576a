#include "optimizer/update_threads.h"

#include <algorithm>
#include <atomic>

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

namespace terrace {

struct UpdateThreads::Arena {
  explicit Arena(int count) : arena(count) {}

  oneapi::tbb::task_arena arena;
};

UpdateThreads::UpdateThreads(int count)
    : count_(std::clamp(count, 1, oneapi::tbb::info::default_concurrency())), arena_(std::make_unique<Arena>(count_)) {}

UpdateThreads::~UpdateThreads() = default;

void UpdateThreads::for_each(std::size_t parts, const std::function<void(std::size_t)>& part) const {
  // Each takes the next part from here. That also orders what parts see and leave behind, for those who watch it.
  std::atomic<std::size_t> next{0};
  const auto take_parts = [&](int) {
    for (std::size_t i = next.fetch_add(1); i < parts; i = next.fetch_add(1)) {
      part(i);
    }
  };
  const int takers = static_cast<int>(std::min(parts, static_cast<std::size_t>(count_)));
  if (takers <= 1) {
    take_parts(0);
    return;
  }
  arena_->arena.execute([&] { oneapi::tbb::parallel_for(0, takers, take_parts, oneapi::tbb::simple_partitioner()); });
}

}  // namespace terrace
