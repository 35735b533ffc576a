// What the policy brings to the host for queued updates, which are announced.

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using testing::Contains;
using Call = SimulatedDriver::Call;
using World = PrefetchWorld;

TEST(Prefetch, the_host_looks_around_the_end_of_what_is_announced) {
  World world(4, 3, 16, 2);
  const auto chunks = world.chunks(6, nvme);
  world.announce(chunks);
  world.run();
  for (const ChunkId chunk : chunks) world.use(chunk, host, writing);
  world.run();
  EXPECT_EQ(world.state(chunks[0], host), CopyState::valid);
  EXPECT_EQ(world.state(chunks[1], host), CopyState::valid);
}

TEST(Prefetch, what_is_announced_again_gives_way_on_the_drive) {
  World world(4, 3, 16, 1);
  const auto chunks = world.chunks(6, nvme);
  world.announce(chunks);
  world.run();
  std::set<TransferPriority> now;
  std::set<TransferPriority> again;
  const auto note = [&](std::set<TransferPriority>& seen) {
    world.run_until([&] {
      for (const Transfer& transfer : world.in_flight()) {
        if (transfer.from == nvme) seen.insert(transfer.priority);
      }
      return false;
    });
  };
  for (const ChunkId chunk : chunks) {
    world.use(chunk, host, writing);
    note(chunk == chunks.back() ? again : now);
  }
  EXPECT_THAT(now, Contains(TransferPriority::prefetch));
  EXPECT_THAT(again, testing::ElementsAre(TransferPriority::early));
}

TEST(Prefetch, room_for_what_follows_is_made_while_as_much_as_may_is_on_its_way) {
  World world(4, 6, 32, 2);
  const auto chunks = world.chunks(12, nvme);
  world.announce(chunks);
  world.run();
  for (int i = 0; i < 4; ++i) {
    Call& call = world.acquire({{chunks[i], host, writing}});
    ASSERT_TRUE(call.granted());
    world.release(call);
  }
  const auto under_way = [&](Tier from) {
    return std::count_if(world.in_flight().begin(), world.in_flight().end(),
                         [&](const Transfer& each) { return each.from == from; });
  };
  EXPECT_TRUE(world.run_until([&] { return under_way(nvme) == 2 && under_way(host) == 2; }))
      << "reads and write-backs take turns";
}

TEST(Prefetch, what_is_announced_is_brought_to_the_host_in_order) {
  World world(4, 4, 16, 2);
  const auto chunks = world.chunks(8, nvme);
  world.announce({chunks[5]});  // makes room: nothing else is announced
  world.run();
  world.take_actions();
  world.announce({chunks[0], chunks[1], chunks[2]});
  world.run();
  EXPECT_EQ(world.state(chunks[0], host), CopyState::valid);
  EXPECT_EQ(world.state(chunks[1], host), CopyState::valid);
  EXPECT_EQ(world.state(chunks[2], host), CopyState::valid);
}

TEST(Prefetch, what_still_waits_for_its_update_stays_while_some_after_it_have_theirs) {
  World world(4, 4, 32, 2);
  const auto chunks = world.chunks(8, nvme);
  for (const ChunkId chunk : chunks) world.set_update_queued(chunk, true);
  world.announce(chunks);
  world.run();
  ASSERT_EQ(world.state(chunks[0], host), CopyState::valid);
  for (int i = 1; i < 8; ++i) {
    world.use(chunks[i], host, writing);
    world.set_update_queued(chunks[i], false);
    world.run();
    ASSERT_EQ(world.state(chunks[0], host), CopyState::valid) << "after " << i;
  }
}

TEST(Prefetch, nothing_leaves_for_the_last_that_is_announced_where_gradients_that_die_leave_room_for_it) {
  World world(4, 4, 32, 2);
  const ChunkId last = world.chunk(nvme);
  const auto others = world.chunks(3, nvme);
  const ChunkId gradient = world.chunk(nvme, Kind::gradient);
  ASSERT_EQ(world.state(last, host), CopyState::absent);
  world.set_update_queued(gradient, true);
  world.set_update_queued(last, true);
  world.announce({gradient, last});
  world.run();
  EXPECT_EQ(world.state(last, host), CopyState::absent);
  for (const ChunkId other : others) EXPECT_EQ(world.state(other, host), CopyState::valid);
  world.use(gradient, host, reading);
  world.discard(gradient);
  world.run();
  EXPECT_EQ(world.state(last, host), CopyState::valid);
  for (const ChunkId other : others) EXPECT_EQ(world.state(other, host), CopyState::valid);
}

TEST(Prefetch, a_gradient_that_outlives_its_update_leaves_for_what_is_announced) {
  World world(4, 4, 32, 2);
  const ChunkId last = world.chunk(nvme);
  const auto others = world.chunks(3, nvme);
  const ChunkId gradient = world.chunk(nvme, Kind::gradient);
  for (const ChunkId chunk : others) world.set_update_queued(chunk, true);
  world.set_update_queued(gradient, true);
  world.set_update_queued(last, true);
  world.announce({gradient, others[0], others[1], others[2], last});
  world.use(gradient, host, reading);
  world.update_done(gradient);
  world.run();
  EXPECT_EQ(world.state(last, host), CopyState::valid);
  EXPECT_EQ(world.state(gradient, host), CopyState::absent);
}

// Else it would not be filled ahead of its next use.
TEST(Prefetch, a_gradient_that_has_died_of_its_update_has_none_behind_it) {
  World world(3, 8, 0, 2);
  const ChunkId gradient = world.chunk(host, Kind::gradient);
  world.set_update_queued(gradient, true);
  world.discard(gradient);
  world.update_done(gradient);
  EXPECT_EQ(world.policy().chunk(gradient).update, Residency::Update::none);
}

}  // namespace
}  // namespace terrace
