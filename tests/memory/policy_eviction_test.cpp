// What gives its room up: eviction, discards, removal.
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

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using Call = SimulatedDriver::Call;
using World = PolicyWorld;

// ---- Eviction

TEST(Policy, evicts_the_copy_used_longest_ago) {
  World world(3, 8);
  std::vector<ChunkId> chunks;
  for (int i = 0; i < 4; ++i) chunks.push_back(world.written(host));
  world.read(chunks[0], device);
  world.read(chunks[1], device);
  world.read(chunks[2], device);
  world.read(chunks[0], device);
  world.take_actions();
  world.read(chunks[3], device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(chunks[1], device), moves(chunks[3], host, device)));
}

TEST(Policy, a_copy_is_used_until_its_pin_ends) {
  World world(2, 8);
  const ChunkId long_held = world.written(host);
  const ChunkId used_meanwhile = world.written(host);
  const ChunkId wanted = world.written(host);
  Call& holder = world.acquire({reads(long_held)});
  world.run();
  world.read(used_meanwhile, device);
  world.release(holder);
  world.take_actions();
  world.read(wanted, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(used_meanwhile, device), moves(wanted, host, device)));
}

TEST(Policy, drops_a_clean_copy_without_a_transfer) {
  World world(1, 4);
  const ChunkId clean = world.written(host);
  const ChunkId wanted = world.written(host);
  world.read(clean, device);
  world.take_actions();
  world.read(wanted, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(clean, device), moves(wanted, host, device)));
}

TEST(Policy, drops_what_nobody_has_written_without_a_transfer) {
  World world(1, 8);
  const ChunkId blank = world.fresh(host);
  const ChunkId other = world.written(host);
  world.read(blank, device);
  world.take_actions();
  world.read(other, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(blank, device), moves(other, host, device)));
  world.write(blank, device);
  world.take_actions();
  world.read(other, device);
  EXPECT_THAT(world.take_actions(), Contains(moves(blank, device, host))) << "now it has bytes";
}

TEST(Policy, a_dirty_copy_travels_home_before_its_room_is_given_up) {
  World world(1, 4);
  const ChunkId dirty = world.written(host);
  const ChunkId wanted = world.written(host);
  world.write(dirty, device);
  world.take_actions();
  Call& call = world.acquire({reads(wanted)});
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(dirty, device, host)));
  EXPECT_EQ(world.state(dirty, device), CopyState::leaving);
  world.finish();
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(dirty, device)));
  world.report_vacate();
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(wanted, host, device)));
  world.finish();
  EXPECT_TRUE(call.granted());
  EXPECT_EQ(world.state(dirty, host), CopyState::valid);
}

TEST(Policy, a_dirty_copy_on_the_host_travels_home_though_the_device_has_the_bytes_too) {
  World world(2, 1, 4);
  const ChunkId chunk = world.fresh(nvme);
  const ChunkId other = world.fresh(nvme);
  world.write(chunk, host);
  world.read(chunk, device);
  world.take_actions();
  world.write(other, host);
  EXPECT_THAT(world.take_actions(), Contains(moves(chunk, host, nvme)));
  EXPECT_EQ(world.state(chunk, device), CopyState::valid);
  EXPECT_EQ(world.state(chunk, nvme), CopyState::valid);
}

TEST(Policy, no_room_is_used_before_it_is_reported_vacated) {
  World world(1, 4);
  const ChunkId old = world.written(host);
  const ChunkId wanted = world.written(host);
  world.read(old, device);
  world.take_actions();
  Call& call = world.acquire({reads(wanted)});
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(old, device)));
  EXPECT_TRUE(call.waiting());
  EXPECT_EQ(world.budget(device).used(), MiB);
  world.run();
  EXPECT_TRUE(call.granted());
}

TEST(Policy, the_room_at_home_is_never_given_up) {
  World world(1, 4);
  const ChunkId resting = world.written(device);
  const ChunkId wanted = world.written(host);
  EXPECT_TRUE(world.acquire({reads(wanted)}).refused_with<OutOfMemory>());
  EXPECT_EQ(world.state(resting, device), CopyState::valid);

  world.write(resting, host);  // newer bytes elsewhere: the room stays all the same
  EXPECT_EQ(world.state(resting, device), CopyState::reserved);
  EXPECT_TRUE(world.acquire({reads(wanted)}).refused_with<OutOfMemory>());
  EXPECT_EQ(world.budget(device).used(Kind::parameter), MiB);
}

TEST(Policy, a_copy_in_the_middle_leaves_for_home_though_it_did_not_come_from_there) {
  World world(1, 1, 4);
  const ChunkId chunk = world.fresh(nvme);
  world.write(chunk, device);
  world.read(chunk, host);
  const ChunkId other = world.fresh(nvme);
  world.take_actions();
  world.read(other, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(chunk, device), fills(other, device)))
      << "the host has the bytes too";
  world.read(other, host);
  EXPECT_THAT(world.take_actions(),
              ElementsAre(moves(chunk, host, nvme), vacates(chunk, host), moves(other, device, host)));
}

TEST(Policy, one_operand_is_not_evicted_for_another_of_the_same_request) {
  World world(2, 4);
  const ChunkId there = world.written(host);
  const ChunkId bystander = world.written(host);
  const ChunkId missing = world.written(host);
  world.read(there, device);
  world.read(bystander, device);  // used after the operand
  world.take_actions();
  Call& call = world.acquire({reads(missing), reads(there)});
  world.run();
  EXPECT_TRUE(call.granted());
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(bystander, device), moves(missing, host, device)));
}

TEST(Policy, a_leaving_copy_that_is_wanted_again_stays) {
  World world(2, 4);
  const ChunkId dirty = world.written(host);
  const ChunkId wanted = world.written(host);
  world.write(dirty, device);
  Call& allocation = world.allocate(2 * MiB);
  ASSERT_EQ(world.state(dirty, device), CopyState::leaving);
  world.budget(device).release(Kind::parameter, 0);
  Call& again = world.acquire({reads(dirty)});
  EXPECT_TRUE(again.waiting()) << "it queues behind the allocation";
  world.finish();  // the write-back: the room is given up, the allocation served
  world.run();
  EXPECT_TRUE(allocation.granted());
  EXPECT_TRUE(again.refused_with<OutOfMemory>());
  world.release(allocation);

  world.write(dirty, device);
  world.read(wanted, device);
  Call& both = world.acquire({reads(wanted), reads(world.written(host))});
  ASSERT_EQ(world.state(dirty, device), CopyState::leaving);
  world.take_actions();
  world.fail(0);  // the fetch would follow the write-back; a first failure keeps the copy where it is
  EXPECT_TRUE(both.waiting());
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(dirty, device, host))) << "and is tried again";
  world.run();
  EXPECT_TRUE(both.granted());
}

TEST(Policy, a_request_keeps_a_leaving_copy_by_its_pin) {
  // The head of the queue has `dirty` leave for a tensor; the tensor's room comes from elsewhere first, so that the
  // next request finds the copy still leaving.
  World world(3, 4);
  const ChunkId dirty = world.written(host);
  world.write(dirty, device);
  Call& held = world.allocate(2 * MiB);
  Call& large = world.allocate(1 * MiB);
  ASSERT_EQ(world.state(dirty, device), CopyState::leaving);
  world.release(held);
  Call& reader = world.acquire({reads(dirty), reads(dirty, host)});
  world.take_actions();
  EXPECT_TRUE(large.granted()) << "the freed room served it";
  EXPECT_EQ(world.state(dirty, device), CopyState::valid);
  world.run();
  EXPECT_TRUE(reader.granted());
  EXPECT_THAT(world.take_actions(), IsEmpty()) << "nothing was dropped";
  EXPECT_EQ(world.state(dirty, device), CopyState::valid);
  EXPECT_EQ(world.state(dirty, host), CopyState::valid);
}

TEST(Policy, a_write_waits_until_no_transfer_reads_the_copy) {
  World world(3, 4);
  const ChunkId dirty = world.written(host);
  world.write(dirty, device);
  Call& held = world.allocate(2 * MiB);
  world.allocate(1 * MiB);
  ASSERT_EQ(world.state(dirty, device), CopyState::leaving);
  world.release(held);
  Call& writer = world.acquire({writes(dirty)});
  EXPECT_TRUE(writer.waiting());
  world.finish();
  EXPECT_TRUE(writer.granted());
  EXPECT_EQ(world.state(dirty, host), CopyState::reserved) << "superseded again";
}

TEST(Policy, a_copy_whose_home_is_being_filled_waits_for_that_and_is_then_dropped) {
  World world(2, 4, 8);
  const ChunkId chunk = world.fresh(host);
  const ChunkId failing = world.written(nvme);
  Call& call = world.acquire({reads(chunk), reads(chunk, host), reads(failing)});
  ASSERT_THAT(world.take_actions(),
              ElementsAre(fills(chunk, device), fills(chunk, host), moves(failing, nvme, device)));
  world.fail(2);
  EXPECT_TRUE(call.refused_with<IoError>());
  world.finish(0);
  world.take_actions();
  Call& allocation = world.allocate(2 * MiB);
  EXPECT_TRUE(allocation.waiting());
  world.run();
  EXPECT_TRUE(allocation.granted()) << allocation.error_text();
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(chunk, device)));
}

// ---- Discard

TEST(Policy, discarded_bytes_are_dropped_without_a_transfer) {
  World world(1, 4, 4);
  const ChunkId dead = world.written(nvme);
  world.write(dead, device);
  world.read(dead, host);
  world.take_actions();
  world.discard(dead);
  EXPECT_THAT(world.take_actions(), UnorderedElementsAre(vacates(dead, device), vacates(dead, host)));
  EXPECT_EQ(world.state(dead, nvme), CopyState::reserved);
  world.run();
  world.read(dead, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(fills(dead, device)));
}

TEST(Policy, discarding_what_rests_at_home_keeps_its_room) {
  World world(1, 2);
  const ChunkId dead = world.written(host);
  world.discard(dead);
  EXPECT_THAT(world.take_actions(), IsEmpty());
  EXPECT_EQ(world.state(dead, host), CopyState::reserved);
  EXPECT_EQ(world.budget(host).used(), MiB);
}

TEST(Policy, a_discard_waits_for_the_pins_and_transfers_on_the_chunk) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& reader = world.acquire({reads(chunk)});
  world.discard(chunk);
  world.run();
  ASSERT_TRUE(reader.granted());
  EXPECT_EQ(world.state(chunk, device), CopyState::valid);
  world.release(reader);
  EXPECT_EQ(world.state(chunk, device), CopyState::absent);
  EXPECT_EQ(world.state(chunk, host), CopyState::reserved);
}

TEST(Policy, a_later_write_takes_a_discard_back) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& reader = world.acquire({reads(chunk, host)});
  world.discard(chunk);
  Call& writer = world.acquire({writes(chunk, host)});
  ASSERT_TRUE(writer.granted());
  world.release(reader);
  world.release(writer);
  EXPECT_EQ(world.state(chunk, host), CopyState::valid);
  world.take_actions();
  world.read(chunk, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(chunk, host, device)));
}

// ---- Removal

TEST(Policy, a_removed_chunk_gives_its_room_up_on_every_tier) {
  World world(2, 2, 4);
  const ChunkId gone = world.fresh(nvme);
  world.write(gone, device);
  world.read(gone, host);
  world.take_actions();
  world.remove(gone);
  EXPECT_THAT(world.take_actions(),
              UnorderedElementsAre(vacates(gone, device), vacates(gone, host), vacates(gone, nvme)));
  world.run();
  for (const Tier tier : all_tiers) {
    EXPECT_EQ(world.policy().chunk_bytes(tier), 0u) << name_of(tier);
  }
  EXPECT_TRUE(world.acquire({reads(gone)}).refused_with<LogicError>());
  EXPECT_NE(world.fresh(host), gone) << "ids are not given twice";
}

TEST(Policy, a_removal_waits_for_the_pins_and_transfers_on_the_chunk) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& writer = world.acquire({writes(chunk)});
  world.remove(chunk);
  EXPECT_TRUE(writer.refused_with<LogicError>()) << "its bytes were still on their way";
  EXPECT_EQ(world.state(chunk, host), CopyState::valid);
  world.run();
  EXPECT_EQ(world.policy().chunk_bytes(host) + world.policy().chunk_bytes(device), 0u);

  const ChunkId held = world.written(host);
  world.read(held, device);
  Call& holder = world.acquire({writes(held)});
  ASSERT_TRUE(holder.granted());
  world.remove(held);
  EXPECT_EQ(world.state(held, device), CopyState::valid);
  world.release(holder);
  world.run();
  EXPECT_EQ(world.policy().chunk_bytes(host) + world.policy().chunk_bytes(device), 0u);
}

TEST(Policy, who_waits_behind_others_for_a_removed_chunk_is_refused) {
  World world(1, 4);
  const ChunkId first = world.written(host);
  const ChunkId gone = world.written(host);
  Call& ahead = world.acquire({reads(first)});
  Call& waits = world.acquire({reads(gone)});
  ASSERT_TRUE(waits.waiting());
  world.remove(gone);
  EXPECT_TRUE(waits.refused_with<LogicError>());
  world.run();
  EXPECT_TRUE(ahead.granted());
}

}  // namespace
}  // namespace terrace
