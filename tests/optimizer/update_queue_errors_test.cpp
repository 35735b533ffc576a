// An error of a queued update reaches whoever needs what it was to make, and loses nothing.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "optimizer/update_queue.h"
#include "tests/optimizer/update_world.h"

namespace terrace {
namespace {

class FailingUpdates : public testing::TestWithParam<double> {
 protected:
  FailingUpdates() : world_(scarce, Tier::nvme) { world_.add_sets(6); }

  FaultInjectingEngine& engine() { return world_.world.engine; }
  /// Reads succeed again: also those that are under way, which whoever asks for their bytes would wait for.
  void end_faults() {
    engine().failing_reads = 0;
    for (TestSet& set : world_.sets) {
      for (const auto& [chunk, bytes] : set.state()) {
        while (world_.world.state(chunk, Tier::host) == CopyState::arriving) std::this_thread::yield();
      }
      while (world_.world.state(*set.chunks.gradient, Tier::host) == CopyState::arriving) std::this_thread::yield();
    }
  }
  void use(std::size_t set) { world_.world.acquire(world_.sets[set].chunks.parameter, Tier::host); }
  /// Of the first sets nothing is on the host any more.
  void expect_first_sets_away() {
    for (const std::size_t set : {0u, 1u}) {
      const ChunkSet& chunks = world_.sets[set].chunks;
      for (const ChunkId chunk : {chunks.parameter, *chunks.gradient, *chunks.momentum, *chunks.variance}) {
        ASSERT_EQ(world_.world.state(chunk, Tier::host), CopyState::absent);
      }
    }
  }

  UpdateWorld world_;
};

INSTANTIATE_TEST_SUITE_P(Clipping, FailingUpdates, testing::Values(not_clipping, clipping));

TEST_P(FailingUpdates, an_error_in_the_background_reaches_whoever_is_owed_something) {
  expect_first_sets_away();
  {
    UpdateQueue queue(world_.world.stream, true, 2);
    engine().failing_reads = 1'000'000;
    const UpdateTicket ticket = queue.submit(world_.job(1, GetParam(), {0, 1, 2, 3, 4}));
    EXPECT_THROW(queue.finish(), IoError);
    end_faults();
    for (std::size_t set = 0; set < 5; ++set) EXPECT_THROW(use(set), IoError) << "set " << set;
    EXPECT_NO_THROW(use(5)) << "which is owed nothing";
    EXPECT_THROW(queue.finish(), IoError) << "again";
    EXPECT_THROW(queue.submit(world_.job(2, GetParam(), {0})), IoError);
    if (GetParam() > 0) {
      EXPECT_THROW(queue.norm(ticket), IoError);
    }
  }
  EXPECT_EQ(world_.current(), world_.all()) << "nothing has changed";
}

TEST_P(FailingUpdates, an_error_of_an_update_that_is_needed_reaches_the_access_and_finish) {
  expect_first_sets_away();
  {
    UpdateQueue queue(world_.world.stream, false, 2);
    engine().failing_reads = 1'000'000;
    queue.submit(world_.job(1, GetParam(), {0, 1, 2}));
    EXPECT_THROW(use(1), IoError);
    end_faults();
    EXPECT_THROW(use(1), IoError);
    EXPECT_THROW(use(0), IoError);
    EXPECT_THROW(queue.finish(), IoError);
  }
  EXPECT_EQ(world_.current(), world_.all()) << "nothing has changed";
}

TEST_P(FailingUpdates, the_destructor_swallows_an_error_that_nobody_has_asked_for) {
  for (const bool background : {false, true}) {
    UpdateWorld world(scarce, Tier::nvme);
    world.add_sets(6);
    UpdateQueue queue(world.world.stream, background, 2);
    world.world.engine.failing_reads = 1'000'000;
    queue.submit(world.job(1, GetParam(), {0, 1, 2}));
  }
}

TEST_P(FailingUpdates, what_was_updated_before_the_error_can_be_used) {
  expect_first_sets_away();
  UpdateQueue queue(world_.world.stream, false, 2);
  queue.submit(world_.job(1, GetParam(), {0, 1, 2, 3}));
  world_.update_arrays(1, GetParam(), {0, 1, 2, 3});
  use(0);
  use(2);
  use(3);  // so that set 1 is not on the host
  engine().failing_reads = 1'000'000;
  EXPECT_THROW(use(1), IoError);
  end_faults();
  for (const std::size_t set : {0u, 2u, 3u}) {
    EXPECT_TRUE(world_.is_current(world_.sets[set], AccessOrigin::program)) << "set " << set;
  }
}

TEST_P(FailingUpdates, an_update_that_others_left_no_room_for_is_done_when_there_is_some) {
  UpdateQueue queue(world_.world.stream, false, 2);
  queue.submit(world_.job(1, GetParam(), {0, 1}));
  {
    const ChunkSet& other = world_.sets[5].chunks;
    const std::array accesses{ChunkAccess{*other.master, Tier::host, Access::read},
                              ChunkAccess{*other.momentum, Tier::host, Access::read},
                              ChunkAccess{*other.variance, Tier::host, Access::read}};
    const Pin pin = world_.world.stream.acquire(accesses);
    EXPECT_THROW(use(0), OutOfMemory);
    EXPECT_THROW(queue.finish(), OutOfMemory);
  }
  world_.update_arrays(1, GetParam(), {0, 1});
  EXPECT_NO_THROW(queue.finish());
  EXPECT_EQ(world_.current(), world_.all());
}

// Else the program would do the whole rest of the step's update by itself, while it waits.
TEST_P(FailingUpdates, the_background_goes_on_with_the_rest_once_somebody_has_found_room_again) {
  UpdateQueue queue(world_.world.stream, true, 2);
  const ChunkSet& other = world_.sets[5].chunks;
  const std::array accesses{ChunkAccess{*other.master, Tier::host, Access::read},
                            ChunkAccess{*other.momentum, Tier::host, Access::read}};
  Pin pin = world_.world.stream.acquire(accesses);  // there is room for set 0 beside it, and none for set 1
  const std::vector<std::uint32_t> sets{0, 1, 2, 3, 4};
  std::array<std::promise<void>, 10> updated;
  UpdateJob job = world_.job(1, GetParam(), sets);
  for (std::size_t i = 0; i < updated.size(); ++i) {
    job.segments[i].gradient = {nullptr, [&updated, i](const void*) { updated[i].set_value(); }};
  }
  queue.submit(std::move(job));
  world_.update_arrays(1, GetParam(), sets);
  updated[0].get_future().wait();
  // The background is at set 1 as soon as it leaves set 0: whoever finds no room there has seen it fail.
  EXPECT_THROW(queue.finish(), OutOfMemory);
  EXPECT_FALSE(world_.is_current(world_.sets[4])) << "it tries no other";
  pin.release();
  use(1);
  for (const std::size_t set : {2u, 3u, 4u}) {
    const auto result = updated[2 * set].get_future().wait_for(std::chrono::seconds(20));
    EXPECT_EQ(result, std::future_status::ready) << "set " << set;
  }
  EXPECT_NO_THROW(queue.finish());
  EXPECT_EQ(world_.current(), world_.all());
}

}  // namespace
}  // namespace terrace
