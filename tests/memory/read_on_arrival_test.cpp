// Chunks that somebody beside the program reads on the host once, as soon as they come there.

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;
using Call = SimulatedDriver::Call;
using World = PrefetchWorld;

/// Gradients that backward writes on the device and an update reads on the host, step by step.
struct Backward : World {
  Backward(int count, std::uint64_t device_mib, std::uint64_t host_mib, Tier home, std::size_t prefetch_depth = 4)
      : World(device_mib, host_mib, 64, prefetch_depth) {
    for (int i = 0; i < count; ++i) gradients.push_back(chunk(home, Kind::gradient));
    for (int i = 0; i < 3; ++i) step();
  }
  void write(ChunkId gradient) {
    set_read_on_arrival(gradient, true);
    use_once_there(gradient, device, writing);
  }
  /// Updates are announced in the order in which parameters are used next: that of the gradients, turned around.
  void update() {
    step_mark();
    announce({gradients.rbegin(), gradients.rend()});
    for (auto at = gradients.rbegin(); at != gradients.rend(); ++at) {
      use(*at, host, reading);
      discard(*at);
    }
    run();
  }
  void step() {
    begin_pass(1);
    for (const ChunkId gradient : gradients) write(gradient);
    run();
    update();
  }
  std::vector<ChunkId> gradients;
};

TEST(ReadOnArrival, a_chunk_is_read_once_it_comes_to_the_host_after_its_next_write) {
  World world(4, 4, 4, 4);
  const ChunkId chunk = world.chunk(host, Kind::gradient);
  world.set_read_on_arrival(chunk, true);
  EXPECT_THAT(world.being_read(), IsEmpty()) << "it is there, and has not been written since";
  world.write(chunk, device);
  EXPECT_THAT(world.being_read(), IsEmpty());
  world.use_once_there(chunk, host, reading);
  EXPECT_THAT(world.being_read(), ElementsAre(chunk));
  world.end_reading();
  world.write(chunk, device);
  world.read(chunk, host);
  EXPECT_THAT(world.being_read(), IsEmpty()) << "once";
}

TEST(ReadOnArrival, one_that_is_not_wanted_any_more_or_was_discarded_is_not_read) {
  World world(4, 4, 4, 4);
  for (const bool discarded : {false, true}) {
    const ChunkId chunk = world.chunk(host, Kind::gradient);
    world.set_read_on_arrival(chunk, true);
    world.write(chunk, device);
    discarded ? world.discard(chunk) : world.set_read_on_arrival(chunk, false);
    world.use_once_there(chunk, host, reading);
    EXPECT_THAT(world.being_read(), IsEmpty());
  }
}

TEST(ReadOnArrival, a_write_waits_for_the_reader_and_a_read_does_not) {
  World world(4, 4, 4, 4);
  const ChunkId chunk = world.chunk(host, Kind::gradient);
  world.set_read_on_arrival(chunk, true);
  world.write(chunk, device);
  world.use_once_there(chunk, host, reading);
  ASSERT_THAT(world.being_read(), ElementsAre(chunk));
  Call& read = world.acquire({{chunk, device, reading}});
  EXPECT_TRUE(read.granted());
  world.release(read);
  Call& write = world.acquire({{chunk, device, writing}});
  EXPECT_TRUE(write.waiting());
  EXPECT_EQ(world.policy().wait_of(write.request), (Wait{StallCause::update, chunk}));
  world.end_reading();
  EXPECT_TRUE(write.granted());
}

TEST(ReadOnArrival, one_that_nobody_has_begun_ends_with_a_write_or_when_it_is_not_wanted_any_more) {
  World world(4, 4, 4, 4);
  for (const bool written : {false, true}) {
    const ChunkId chunk = world.chunk(host, Kind::gradient);
    world.set_readers_begin(false);
    world.set_read_on_arrival(chunk, true);
    world.use_once_there(chunk, device, writing);
    world.use_once_there(chunk, host, reading);
    EXPECT_TRUE(world.policy().has_readings());
    if (written) {
      Call& write = world.acquire({{chunk, device, writing}});
      EXPECT_TRUE(write.granted());
      world.release(write);
    } else {
      world.set_read_on_arrival(chunk, false);
    }
    EXPECT_FALSE(world.policy().has_readings());
    EXPECT_FALSE(world.policy().chunk(chunk).being_read);
    world.run();
  }
}

TEST(ReadOnArrival, a_chunk_that_is_removed_meanwhile_is_given_up_when_the_reader_is_done) {
  World world(4, 4, 4, 4);
  const ChunkId chunk = world.chunk(host, Kind::gradient);
  world.set_read_on_arrival(chunk, true);
  world.write(chunk, device);
  world.use_once_there(chunk, host, reading);
  world.remove(chunk);
  EXPECT_FALSE(world.policy().is_gone(chunk));
  world.run();
  EXPECT_TRUE(world.policy().is_gone(chunk));
  world.set_read_on_arrival(chunk, true);  // nothing happens
  EXPECT_THROW(world.policy().reading_done(chunk), LogicError);
}

TEST(ReadOnArrival, what_passes_the_host_on_its_way_to_nvme_is_read_and_written_at_once) {
  Backward world(8, 4, 3, nvme);
  world.begin_pass(1);
  world.write(world.gradients[0]);
  ASSERT_TRUE(world.run_until([&] { return !world.being_read().empty(); }));
  EXPECT_THAT(world.being_read(), ElementsAre(world.gradients[0]));
  EXPECT_TRUE(world.has_in_flight(world.gradients[0], host, nvme));
  while (!world.in_flight().empty()) world.finish();
  EXPECT_EQ(world.state(world.gradients[0], host), CopyState::leaving) << "until it is read, too";
  world.end_reading();
  EXPECT_EQ(world.state(world.gradients[0], host), CopyState::absent);
}

TEST(ReadOnArrival, all_gradients_of_a_backward_are_read_though_the_host_has_room_for_few) {
  for (const std::uint64_t host_mib : {1, 2, 3, 5}) {
    Backward world(12, 5, host_mib, nvme);
    world.take_actions();
    world.begin_pass(1);
    std::vector<ChunkId> read;
    const auto end_readings = [&] {
      while (!world.being_read().empty()) {
        read.push_back(world.being_read().front());
        world.end_reading();
      }
    };
    for (const ChunkId gradient : world.gradients) {
      world.set_read_on_arrival(gradient, true);
      Call& call = world.acquire({{gradient, device, writing}});
      while (call.waiting()) {
        end_readings();
        world.go_on();
      }
      world.release(call);
    }
    while (!world.idle()) {
      end_readings();
      if (!world.idle()) world.go_on();
    }
    EXPECT_THAT(read, testing::UnorderedElementsAreArray(world.gradients)) << host_mib;
    // Straight to NVMe goes none, and none comes back for it.
    for (const Action& action : world.take_actions()) {
      EXPECT_FALSE(action.what == Action::What::move && action.from == nvme) << action;
      EXPECT_FALSE(action.what == Action::What::move && action.from == device && action.to == nvme) << action;
    }
  }
}

TEST(ReadOnArrival, what_waits_on_the_device_for_its_update_comes_for_the_reader_and_stays_there) {
  Backward world(12, 8, 3, nvme);
  world.begin_pass(1);
  world.take_actions();
  for (const ChunkId gradient : world.gradients) world.write(gradient);
  world.run();
  int waits = 0;
  const std::vector<Action> actions = world.take_actions();
  for (const ChunkId gradient : world.gradients) {
    if (!world.policy().chunk(gradient).waits_for_update) continue;
    EXPECT_THAT(actions, Contains(moves(gradient, device, host)));
    EXPECT_THAT(actions, Not(Contains(moves(gradient, host, nvme))));
    ++waits;
    EXPECT_EQ(world.state(gradient, device), CopyState::valid);
    EXPECT_EQ(world.state(gradient, host), CopyState::absent);
    EXPECT_FALSE(world.policy().chunk(gradient).is_to_be_read()) << "it has been";
  }
  EXPECT_GT(waits, 0);
}

}  // namespace
}  // namespace terrace
