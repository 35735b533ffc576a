// What the policy does ahead of need, once it has seen a pass.

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using Call = SimulatedDriver::Call;
using World = PrefetchWorld;

TEST(Prefetch, a_known_pass_waits_for_nothing_when_transfers_keep_up) {
  World world(3, 16, 0, 2);
  const auto accesses = reads(world.chunks(10, host));
  world.learn(accesses);
  world.run();
  const std::uint64_t before = world.stalls();
  for (int round = 0; round < 3; ++round) {
    for (const ChunkAccess& access : accesses) {
      Call& call = world.acquire({access});
      EXPECT_TRUE(call.granted()) << "chunk " << access.chunk;
      world.release(call);
      world.run();
    }
    world.step_mark();
    world.run();
  }
  EXPECT_EQ(world.stalls(), before);
}

TEST(Prefetch, without_depth_nothing_is_fetched_before_somebody_asks) {
  World world(3, 16, 0, 0);
  world.learn(reads(world.chunks(5, host)));
  EXPECT_TRUE(world.idle());
}

TEST(Prefetch, no_more_than_the_depth_is_under_way_at_once) {
  World world(8, 16, 0, 3);
  const auto chunks = world.chunks(12, host);
  world.learn(reads(chunks));
  EXPECT_EQ(world.in_flight().size(), 3u);
  for (const Transfer& transfer : world.in_flight()) EXPECT_EQ(transfer.priority, TransferPriority::prefetch);
}

TEST(Prefetch, never_displaces_what_is_used_sooner) {
  World world(2, 16, 0, 4);
  const auto chunks = world.chunks(6, host);
  world.learn(reads(chunks));
  world.run();
  EXPECT_EQ(world.state(chunks[0], device), CopyState::valid);
  EXPECT_EQ(world.state(chunks[1], device), CopyState::valid);
  EXPECT_EQ(world.state(chunks[2], device), CopyState::absent) << "there is room for two";
}

TEST(Prefetch, an_evaluation_that_goes_on_and_on_has_what_it_needs_from_the_third_time_on) {
  World world(3, 16, 0, 2);
  const auto chunks = world.chunks(6, host);
  world.begin_pass(1, ScheduleBook::End::repetition);
  const auto evaluate = [&] {
    for (const ChunkAccess& access : reads(chunks)) {
      world.run();  // computation takes as long as transfers
      world.pass({access});
    }
    world.run();
  };
  for (int i = 0; i < 3; ++i) evaluate();
  const std::uint64_t stalls_before = world.stalls();
  EXPECT_GT(stalls_before, 0u);
  for (int i = 0; i < 5; ++i) evaluate();
  EXPECT_EQ(world.stalls(), stalls_before);
}

TEST(Prefetch, models_that_train_in_turn_have_what_they_need_once_they_have_done_so_twice) {
  World world(3, 32, 0, 2);
  const auto one = world.chunks(6, host);
  const auto other = world.chunks(6, host);
  const auto step = [&](ScheduleBook::Key key, const std::vector<ChunkId>& chunks) {
    world.begin_pass(key);
    for (const ChunkAccess& access : reads(chunks)) {
      world.run();
      world.pass({access});
    }
    world.step_mark();
    world.run();
  };
  const auto both = [&] {
    step(1, one);
    step(2, other);
  };
  both();
  both();
  const std::uint64_t stalls_before = world.stalls();
  both();
  EXPECT_EQ(world.stalls(), stalls_before);
}

TEST(Prefetch, leaves_the_room_that_the_program_will_need_by_then) {
  World world(4, 16, 0, 8);
  const auto chunks = world.chunks(4, host);
  world.step_mark();
  world.begin_pass(1);
  world.pass({{chunks[0], device, reading}, {chunks[1], device, reading}});
  Call& tensor = world.allocate(2 * MiB);
  world.run();
  ASSERT_TRUE(tensor.granted());
  world.pass({{chunks[2], device, reading}});
  world.release(tensor);
  world.pass({{chunks[3], device, reading}});
  for (const ChunkId chunk : chunks) world.write(chunk, host);  // as an update does: no copy on the device is any good
  world.step_mark();
  world.run();
  int there = 0;
  for (const ChunkId chunk : chunks) there += world.state(chunk, device) == CopyState::valid ? 1 : 0;
  EXPECT_EQ(there, 2) << "of 4MiB, 2MiB are the program's before the third is used";
}

TEST(Prefetch, what_left_for_a_tensor_comes_back_ahead_of_need_when_that_has_gone) {
  World world(6, 16, 0, 4);
  const auto chunks = world.chunks(6, host);
  world.learn(reads(chunks));
  world.run();
  world.use(chunks[0], device, reading);
  Call& tensor = world.allocate(4 * MiB);
  world.run();
  ASSERT_TRUE(tensor.granted());
  EXPECT_EQ(world.state(chunks[4], device), CopyState::absent);
  world.release(tensor);
  world.use(chunks[1], device, reading);  // frees are not the policy's to see, and the next op comes soon
  world.run();
  for (std::size_t i = 1; i < chunks.size(); ++i) EXPECT_EQ(world.state(chunks[i], device), CopyState::valid) << i;
  EXPECT_EQ(world.stalls(), 6u) << "as in the first pass";
}

TEST(Prefetch, who_needs_a_chunk_that_is_on_its_way_makes_it_urgent) {
  World world(4, 16, 0, 2);
  const auto chunks = world.chunks(6, host);
  world.learn(reads(chunks));
  ASSERT_FALSE(world.in_flight().empty());
  const ChunkId coming = world.in_flight().front().chunk;
  Call& call = world.acquire({{coming, device, reading}});
  EXPECT_TRUE(call.waiting());
  const auto urgent = world.take_urgent();
  ASSERT_EQ(urgent.size(), 1u);
  EXPECT_EQ(urgent[0].chunk, coming);
  world.run();
  EXPECT_TRUE(call.granted());
}

TEST(Prefetch, a_failed_fetch_ahead_of_need_is_nobodys_error_and_is_tried_again_when_it_is_needed) {
  World world(4, 16, 0, 1);
  const auto chunks = world.chunks(6, host);
  world.learn(reads(chunks));
  const ChunkId coming = world.in_flight().front().chunk;
  world.fail();
  world.run();
  world.use(coming, device, reading);
}

TEST(Prefetch, a_chunk_with_a_queued_update_is_not_fetched_before_it) {
  World world(4, 16, 0, 4);
  const auto chunks = world.chunks(6, host);
  world.step_mark();
  world.begin_pass(1);
  world.pass(reads(chunks));
  for (const ChunkId chunk : chunks) world.set_update_queued(chunk, true);
  world.step_mark();
  EXPECT_TRUE(world.idle());
  world.set_update_queued(chunks[0], false);
  world.give_up_rooms();
  ASSERT_EQ(world.in_flight().size(), 1u);
  EXPECT_EQ(world.in_flight()[0].chunk, chunks[0]);
}

/// A gradient: written in every pass, dead after it.
struct WithGradient : World {
  explicit WithGradient(std::uint64_t device_mib) : World(device_mib, 16, 0, 4) {
    parameters = chunks(5, host);
    gradient =
        add_chunk({.kind = Kind::gradient, .index = 0, .bytes = MiB, .home = host, .room_bytes = {MiB, MiB, MiB}});
    step_mark();
    begin_pass(1);
    pass({{parameters[0], device, reading}, {gradient, device, writing}});
    pass(reads({parameters[1], parameters[2], parameters[3], parameters[4]}));
    run();
    discard(gradient);
    step_mark();
    run();
  }
  std::vector<ChunkId> parameters;
  ChunkId gradient = 0;
};

TEST(Prefetch, a_chunk_that_begins_as_zeros_is_filled_before_its_use) {
  WithGradient world(8);
  EXPECT_EQ(world.state(world.gradient, device), CopyState::valid);
}

TEST(Prefetch, never_takes_the_room_of_a_chunk_that_begins_as_zeros_sooner) {
  WithGradient world(2);
  EXPECT_EQ(world.state(world.parameters[0], device), CopyState::valid);
  EXPECT_EQ(world.state(world.parameters[1], device), CopyState::absent) << "the gradient's room";
}

TEST(Prefetch, what_left_for_a_chunk_that_does_not_fit_all_the_same_stays_away) {
  World world(8, 16, 0, 2, /*device_chunk_limit=*/2 * MiB);
  const auto chunks = world.chunks(2, host);
  const ChunkId gradient = world.add_chunk(
      {.kind = Kind::gradient, .index = 0, .bytes = 2 * MiB, .home = host, .room_bytes = {2 * MiB, 2 * MiB, 2 * MiB}});
  world.learn({{chunks[0], device, reading}, {gradient, device, writing}, {chunks[1], device, reading}});
  world.run();
  world.discard(gradient);
  world.run();
  world.take_actions();
  Call& held = world.acquire({{chunks[0], device, reading}});
  int steps = 0;
  EXPECT_FALSE(world.run_until([&] { return ++steps > 100; })) << "fetched and dropped for ever";
  world.run_until([&] { return held.granted(); });
  world.release(held);
}

TEST(Prefetch, who_waits_for_room_hurries_the_write_backs_that_free_it) {
  World world(2, 16, 0, 1);
  const auto chunks = world.chunks(2, host);
  world.learn({{chunks[0], device, writing}, {chunks[1], device, writing}});
  world.run();
  Call& call = world.acquire({{chunks[0], device, writing}});
  world.run();
  world.release(call);
  ASSERT_EQ(world.in_flight().size(), 1u);
  EXPECT_EQ(world.in_flight()[0].priority, TransferPriority::write_back);
  world.take_urgent();
  Call& tensor = world.allocate(2 * MiB);
  EXPECT_TRUE(tensor.waiting());
  const auto urgent = world.take_urgent();
  EXPECT_TRUE(std::any_of(urgent.begin(), urgent.end(),
                          [&](const Transfer& each) { return each.chunk == chunks[0] && each.to == host; }));
  world.run();
  EXPECT_TRUE(tensor.granted());
}

TEST(Prefetch, no_room_is_made_for_what_is_written_without_bytes_after_it_is_used_otherwise) {
  World world(2, 8, 0, 4);
  const auto parameters = world.chunks(2, host);
  const ChunkId large = world.add_chunk(
      {.kind = Kind::gradient, .index = 2, .bytes = 2 * MiB, .home = host, .room_bytes = {2 * MiB, 2 * MiB, 2 * MiB}});
  world.learn({{large, device, reading},
               {parameters[0], device, reading},
               {large, device, writing},
               {parameters[1], device, reading}});
  world.discard(large);
  world.run();  // and ends: the second parameter does not leave for the large one, for which that is too little
  for (const ChunkId parameter : parameters) EXPECT_EQ(world.state(parameter, device), CopyState::valid);
}

}  // namespace
}  // namespace terrace
