// What a transfer that fails leaves behind.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "memory/policy.h"
#include "tests/memory/policy_world.h"

namespace terrace {
namespace {

using testing::ElementsAre;
using Call = SimulatedDriver::Call;
using World = PolicyWorld;

TEST(Policy, a_failed_fetch_reaches_who_asked_for_it) {
  World world(2, 4, 4);
  const ChunkId chunk = world.written(nvme);
  const ChunkId other = world.written(host);
  Call& call = world.acquire({reads(other), reads(chunk)});
  Call& behind = world.acquire({reads(other)});
  world.fail(1, std::make_exception_ptr(IoError("read failed")));
  EXPECT_TRUE(call.refused_with<IoError>());
  EXPECT_EQ(call.error_text(), "read failed");
  EXPECT_TRUE(behind.waiting());
  world.run();
  EXPECT_TRUE(behind.granted());
  EXPECT_EQ(world.state(chunk, device), CopyState::absent);
  EXPECT_EQ(world.state(chunk, nvme), CopyState::valid);
  EXPECT_EQ(world.budget(device).used(), MiB) << "what the failed fetch took is given back";
  world.read(chunk, device);
}

TEST(Policy, any_number_of_failed_fetches_leaves_the_machine_working) {
  World world(2, 4, 4);
  const ChunkId chunk = world.written(nvme);
  for (int i = 0; i < 5; ++i) {
    Call& call = world.acquire({reads(chunk)});
    world.fail();
    EXPECT_TRUE(call.refused_with<IoError>());
    world.run();
  }
  world.read(chunk, device);
  EXPECT_EQ(world.budget(device).used(), MiB);
}

TEST(Policy, a_failed_fill_loses_nothing_and_stops_nothing) {
  World world(2, 4);
  const ChunkId resting = world.fresh(device);
  for (int i = 0; i < 3; ++i) {
    Call& call = world.acquire({writes(resting)});
    world.fail(0, std::make_exception_ptr(OutOfMemory("the system has no memory left")));
    EXPECT_TRUE(call.refused_with<OutOfMemory>());
  }
  world.write(resting, device);
}

TEST(Policy, a_failed_write_back_keeps_the_chunk_dirty_and_resident_and_is_tried_again) {
  World world(1, 4);
  const ChunkId dirty = world.written(host);
  const ChunkId wanted = world.written(host);
  world.write(dirty, device);
  Call& call = world.acquire({reads(wanted)});
  world.take_actions();
  world.fail();
  EXPECT_TRUE(call.waiting());
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(dirty, device, host)));
  world.run();
  EXPECT_TRUE(call.granted());
  EXPECT_EQ(world.state(dirty, host), CopyState::valid);
}

TEST(Policy, a_failed_write_back_that_nobody_waits_for_leaves_the_chunk_usable) {
  World world(2, 4);
  const ChunkId dirty = world.written(host);
  world.write(dirty, device);
  Call& held = world.allocate(MiB);
  Call& tensor = world.allocate(MiB);
  ASSERT_EQ(world.state(dirty, device), CopyState::leaving);
  world.release(held);
  Call& small = world.acquire({reads(dirty)});  // lets the tensor have the freed room
  ASSERT_TRUE(tensor.granted());
  ASSERT_TRUE(small.granted());
  world.fail();
  EXPECT_EQ(world.state(dirty, device), CopyState::valid);
  EXPECT_EQ(world.state(dirty, host), CopyState::reserved);
  EXPECT_TRUE(world.acquire({writes(dirty)}).granted());
}

TEST(Policy, after_a_second_failed_write_back_every_request_is_refused_with_that_error) {
  World world(2, 4);
  const ChunkId dirty = world.written(host);
  const ChunkId there = world.written(host);
  world.write(dirty, device);
  Call& holder = world.acquire({reads(there, host)});
  Call& head = world.allocate(2 * MiB);
  Call& behind = world.acquire({reads(there)});
  world.fail(0, std::make_exception_ptr(IoError("first")));
  ASSERT_TRUE(head.waiting());
  world.fail(0, std::make_exception_ptr(IoError("second")));
  for (Call* call : {&head, &behind}) {
    EXPECT_TRUE(call->refused_with<IoError>());
    EXPECT_EQ(call->error_text(), "second");
  }
  EXPECT_EQ(world.acquire({reads(there, host)}).error_text(), "second") << "also what is there";
  EXPECT_EQ(world.allocate(1).error_text(), "second");
  EXPECT_EQ(world.state(dirty, device), CopyState::valid) << "the newest bytes are kept";
  world.release(holder);
}

TEST(Policy, only_failures_in_a_row_count) {
  World world(1, 4);
  const ChunkId dirty = world.written(host);
  const ChunkId other = world.written(host);
  for (int i = 0; i < 4; ++i) {
    world.write(dirty, device);
    Call& call = world.acquire({reads(other)});
    world.fail();
    world.run();
    ASSERT_TRUE(call.granted()) << call.error_text();
    world.release(call);
  }
}

TEST(Policy, a_transfer_that_was_not_started_cannot_be_reported) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  const Transfer invented{.chunk = chunk, .fill = false, .from = host, .to = device};
  EXPECT_THROW(world.policy().transfer_done(invented), LogicError);
  EXPECT_THROW(world.policy().transfer_failed(invented, nullptr), LogicError);
  world.policy().check_invariants();
}

}  // namespace
}  // namespace terrace
