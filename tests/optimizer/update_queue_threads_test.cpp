// Several threads use what queued updates make, and the queue itself.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "optimizer/update_queue.h"
#include "tests/offload/threads_of_process.h"
#include "tests/optimizer/many_threads.h"
#include "tests/optimizer/update_world.h"

namespace terrace {
namespace {

// Readers may still wait for a set of a job when the training thread has finished that and queued another.
TEST(UpdateQueueThreads, several_find_every_set_updated_while_the_background_works) {
  for (const double max_norm : {not_clipping, clipping}) {
    UpdateWorld world({.granule_bytes = granule,
                       .device_bytes = 1 << 20,
                       .host_bytes = 40 * granule,
                       .nvme_extents = 256,
                       .prefetch_depth = 2},
                      Tier::nvme);
    world.add_sets(6);
    const std::vector<std::uint32_t> many{0, 1, 2, 3, 4}, one{5};
    UpdateQueue queue(world.world.stream, true, 2);
    for (std::int64_t step = 1; step <= 8; ++step) {
      for (TestSet& set : world.sets) world.write_gradient(set);
      const UpdateTicket ticket = queue.submit(world.job(step, max_norm, many));
      const double norm = world.update_arrays(step, max_norm, many);
      std::vector<std::thread> readers;
      for (std::uint32_t reader = 0; reader < 3; ++reader) {
        readers.emplace_back([&, reader] {
          std::vector<std::uint32_t> order = many;
          std::mt19937 random(static_cast<std::uint32_t>(step) * 10 + reader);
          std::shuffle(order.begin(), order.end(), random);
          for (const std::uint32_t index : order) {
            EXPECT_TRUE(world.is_current(world.sets[index], AccessOrigin::program)) << "set " << index;
          }
        });
      }
      EXPECT_EQ(queue.norm(ticket), max_norm > 0 ? std::optional(norm) : std::nullopt);
      queue.submit(world.job(step, max_norm, one));
      world.update_arrays(step, max_norm, one);
      for (std::thread& reader : readers) reader.join();
      EXPECT_TRUE(world.is_current(world.sets[5], AccessOrigin::program));
    }
    world.world.check_invariants();
  }
}

TEST(UpdateQueueThreads, others_may_finish_and_ask_for_norms_while_one_submits) {
  UpdateWorld world(roomy);
  world.add_sets(3);
  const std::vector<std::uint32_t> all = world.all();
  UpdateQueue queue(world.world.stream, true, 2);
  const UpdateTicket first = queue.submit(world.job(1, clipping, all));
  const double norm = world.update_arrays(1, clipping, all);
  std::atomic<bool> done = false;
  std::vector<std::thread> others;
  for (int other = 0; other < 2; ++other) {
    others.emplace_back([&] {
      while (!done) {
        EXPECT_NO_THROW(queue.finish());
        EXPECT_EQ(queue.norm(first), norm);
      }
    });
  }
  for (std::int64_t step = 2; step <= 30; ++step) {
    const std::vector<std::uint32_t> none;
    queue.submit(world.job(step, clipping, step % 3 == 0 ? none : all));  // of nothing too
    if (step % 3 != 0) world.update_arrays(step, clipping, all);
  }
  done = true;
  for (std::thread& other : others) other.join();
  queue.finish();
  EXPECT_EQ(world.current(), all);
  world.world.check_invariants();
}

/// Keeps each of the threads that update a set until all have come.
class MeetingRule final : public UpdateRule {
 public:
  MeetingRule(const AdamWOptions& options, Meeting& meeting) : rule_(options), meeting_(meeting) {}
  void update(std::int64_t step, float gradient_scale, const UpdateRun& run) const override {
    meeting_.come();
    rule_.update(step, gradient_scale, run);
  }

 private:
  const AdamWRule rule_;
  Meeting& meeting_;
};

TEST(UpdateQueueThreads, any_number_that_the_arithmetic_runs_on_gives_the_same_bits) {
  const ManyThreads many;
  for (const int threads : {1, 3, many_threads}) {
    UpdateWorld world(roomy);
    world.add_sets(static_cast<int>(format_count));
    UpdateQueue queue(world.world.stream, true, threads);
    for (std::int64_t step = 1; step <= 2; ++step) {
      std::deque<Meeting> meetings;
      UpdateJob job;
      for (const TestSet& set : world.sets) {
        Meeting& meeting = meetings.emplace_back(threads);
        const std::size_t parts = 2 * many_threads;
        for (std::size_t part = 0; part < parts; ++part) {
          const std::size_t from = part * set.elements / parts;
          job.segments.push_back({.chunks = set.chunks,
                                  .element_offset = from,
                                  .elements = (part + 1) * set.elements / parts - from,
                                  .rule = std::make_shared<MeetingRule>(set.options(), meeting),
                                  .updates = std::make_shared<std::int64_t>(step - 1),
                                  .parameter = "part " + std::to_string(part),
                                  .gradient = nullptr});
        }
      }
      queue.submit(std::move(job));
      queue.finish();
      for (const Meeting& meeting : meetings) EXPECT_EQ(meeting.size(), threads);
      world.update_arrays(step, not_clipping, world.all());
      EXPECT_EQ(world.current(), world.all()) << threads << " threads";
    }
  }
}

TEST(UpdateQueueThreads, the_background_runs_on_the_updates_own_hardware_threads) {
  const Processors all = processors_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "this process may run on one hardware thread only";
  const Processors one{all.back()};
  UpdateWorld world(roomy);
  const auto before = threads_of_process();
  const UpdateQueue queue(world.world.stream, true, 1, one);
  const auto threads = new_threads(before, one);
  EXPECT_EQ(threads.size(), 2u) << "one that updates, and one that sums up gradients";
  for (const auto& [thread, processors] : threads) EXPECT_EQ(processors, one);
  EXPECT_EQ(processors_of_this_thread(), all);
}

}  // namespace
}  // namespace terrace
