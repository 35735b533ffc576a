#include "optimizer/gradient_sums.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "base/clock.h"
#include "offload/start_thread.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/standard_arithmetic.h"

namespace terrace {

double GradientsOnHost::sum_of_block(const GradientRun& run, std::size_t index) const noexcept {
  const std::uint64_t first = std::uint64_t{index} * BlockOfSquares::kElements;
  const std::uint64_t end = run.element_offset + std::min(run.elements, first + BlockOfSquares::kElements);
  const std::uint64_t in_a_granule = granule_bytes / bytes_of(type);
  BlockOfSquares block;
  for (std::uint64_t element = run.element_offset + first; element < end;) {
    const std::uint64_t within = element % in_a_granule;
    const std::uint64_t count = std::min(in_a_granule - within, end - element);
    block.add(type, granules[static_cast<std::size_t>(element / in_a_granule)] + within * bytes_of(type),
              static_cast<std::size_t>(count));
    element += count;
  }
  return block.sum();
}

GradientSums::GradientSums(AccessStream& stream, const UpdateThreads& threads, const Processors& processors)
    : stream_(stream),
      threads_(threads),
      thread_(start_thread<std::thread>("optimizer: starting the thread that sums up gradients", processors,
                                        [this] { work(); })) {}

GradientSums::~GradientSums() {
  std::vector<ChunkId> gradients;
  std::transform(expected_.begin(), expected_.end(), std::back_inserter(gradients),
                 [](const auto& each) { return each.first; });
  expect_no_more(gradients);
  stopping_ = true;
  stream_.wake_reader();
  thread_.join();
}

void GradientSums::expect(ChunkId gradient, ElementType type, std::vector<GradientRun> runs) {
  const std::lock_guard lock(mutex_);
  expected_[gradient] = {.type = type, .runs = std::move(runs), .sums = {}, .writes = 0, .generation = ++generations_};
  stream_.set_read_on_arrival(gradient, true);
}

std::optional<double> GradientSums::of(ChunkId gradient, const GradientRun& run) const {
  const std::lock_guard lock(mutex_);
  const auto found = expected_.find(gradient);
  if (found == expected_.end() || found->second.sums.empty()) {
    return std::nullopt;
  }
  const Expected& known = found->second;
  const auto at = std::find(known.runs.begin(), known.runs.end(), run);
  if (at == known.runs.end() || known.writes != stream_.writes(gradient)) {
    return std::nullopt;
  }
  return known.sums[static_cast<std::size_t>(at - known.runs.begin())];
}

void GradientSums::expect_no_more(std::span<const ChunkId> gradients) {
  const std::lock_guard lock(mutex_);
  for (const ChunkId gradient : gradients) {
    if (expected_.contains(gradient)) {
      stream_.set_read_on_arrival(gradient, false);
    }
  }
}

void GradientSums::work() {
  const StandardArithmetic standard;
  while (const std::optional<HostReading> reading = stream_.await_reading(stopping_)) {
    if (stopping_) {
      continue;  // it is to be let go of
    }
    try {
      sum_up(*reading);
    } catch (const std::bad_alloc&) {
      // There is no sum, then.
    }
  }
}

void GradientSums::sum_up(const HostReading& reading) {
  const std::int64_t begin_ns = monotonic_ns();
  Expected task;
  {
    const std::lock_guard lock(mutex_);
    task = expected_.at(reading.chunk());
  }
  const GradientsOnHost gradients{
      .type = task.type, .granules = reading.host(), .granule_bytes = stream_.granule_bytes()};
  std::vector<std::uint64_t> elements;
  std::transform(task.runs.begin(), task.runs.end(), std::back_inserter(elements),
                 [](const GradientRun& run) { return run.elements; });
  std::vector<double> sums = sums_of_squares(elements, threads_, [&](std::size_t run, std::size_t block) {
    return gradients.sum_of_block(task.runs[run], block);
  });
  stream_.note_update(std::nullopt, begin_ns, monotonic_ns());
  const std::lock_guard lock(mutex_);
  Expected& expected = expected_.at(reading.chunk());
  if (expected.generation == task.generation) {
    expected.sums = std::move(sums);
    expected.writes = reading.writes();
  }
}

}  // namespace terrace
