// What is granted at once, what is fetched, and what a write does.
#include "memory/policy.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "tests/memory/policy_world.h"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Call = SimulatedDriver::Call;
using World = PolicyWorld;

// ---- What is there

TEST(Policy, grants_at_once_what_is_there) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& on_host = world.acquire({reads(chunk, host)});
  EXPECT_TRUE(on_host.granted());
  world.read(chunk, device);
  world.take_actions();
  Call& on_device = world.acquire({reads(chunk)});
  EXPECT_TRUE(on_device.granted());
  EXPECT_THAT(world.take_actions(), IsEmpty());
}

TEST(Policy, fetches_what_is_missing_and_grants_when_all_of_it_has_come) {
  World world(2, 2);
  const ChunkId first = world.written(host);
  const ChunkId second = world.written(host);
  Call& call = world.acquire({reads(first), reads(second)});
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(first, host, device), moves(second, host, device)));
  EXPECT_TRUE(call.waiting());
  world.finish(1);
  EXPECT_TRUE(call.waiting());
  world.finish(0);
  EXPECT_TRUE(call.granted());
}

TEST(Policy, fetches_from_the_nearest_tier_that_has_the_bytes) {
  World world(2, 2, 4);
  const ChunkId chunk = world.written(nvme);
  world.read(chunk, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(chunk, nvme, device)));
  world.read(chunk, host);
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(chunk, device, host)));
}

TEST(Policy, a_chunk_never_written_is_filled_and_needs_no_transfer) {
  World world(1, 1, 1);
  const ChunkId chunk = world.fresh(nvme);
  world.write(chunk, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(fills(chunk, device)));
}

TEST(Policy, an_operand_named_twice_takes_its_room_once) {
  World world(1, 1);
  const ChunkId chunk = world.written(host);
  Call& call = world.acquire({reads(chunk), writes(chunk)});
  world.run();
  ASSERT_TRUE(call.granted()) << call.error_text();
  EXPECT_EQ(world.budget(device).used(), MiB);
  world.release(call);
  EXPECT_EQ(world.policy().chunk(chunk).at(device).pins, 0u);
}

TEST(Policy, a_request_for_a_chunk_that_does_not_exist_is_refused) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& call = world.acquire({reads(chunk), reads(chunk + 1)});
  EXPECT_TRUE(call.refused_with<LogicError>()) << call.error_text();
  EXPECT_EQ(world.policy().waiting(), 0u);
}

TEST(Policy, a_pin_that_nobody_holds_cannot_be_released) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  EXPECT_THROW(world.policy().release(std::vector{reads(chunk, host)}), LogicError);
  Call& call = world.acquire({reads(chunk, host)});
  ASSERT_TRUE(call.granted());
  EXPECT_THROW(world.policy().release(std::vector{writes(chunk, host)}), LogicError);
}

// ---- Writes

TEST(Policy, a_write_supersedes_the_other_copies) {
  World world(2, 2, 8);
  const ChunkId chunk = world.written(nvme);
  world.read(chunk, host);
  world.take_actions();
  world.write(chunk, device);
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(chunk, host, device), vacates(chunk, host)));
  EXPECT_EQ(world.state(chunk, nvme), CopyState::reserved) << "the room at home stays";
  EXPECT_EQ(world.state(chunk, device), CopyState::valid);
  world.read(chunk, host);
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(chunk, device, host)));
}

TEST(Policy, what_is_being_written_can_be_used_on_that_tier_only) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& writer = world.acquire({writes(chunk)});
  world.run();
  ASSERT_TRUE(writer.granted());
  EXPECT_TRUE(world.acquire({reads(chunk, host)}).refused_with<LogicError>());
  EXPECT_TRUE(world.acquire({writes(chunk, host)}).refused_with<LogicError>());
  EXPECT_TRUE(world.acquire({reads(chunk)}).granted());
  EXPECT_TRUE(world.acquire({writes(chunk)}).granted());
}

TEST(Policy, what_is_read_on_one_tier_can_be_read_but_not_written_on_another) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  Call& reader = world.acquire({reads(chunk)});
  world.run();
  ASSERT_TRUE(reader.granted());
  EXPECT_TRUE(world.acquire({reads(chunk, host)}).granted());
  Call& writer = world.acquire({writes(chunk, host)});
  EXPECT_TRUE(writer.refused_with<LogicError>());
  EXPECT_THAT(writer.error_text(), HasSubstr("parameter chunk 0 is wanted for writing on the host"));
  EXPECT_EQ(world.state(chunk, device), CopyState::valid);
}

TEST(Policy, one_request_cannot_use_a_chunk_on_two_tiers_and_change_it) {
  for (const bool write_first : {false, true}) {
    World world(2, 2);
    const ChunkId chunk = world.written(host);
    world.read(chunk, device);  // there on both: nothing would have to move
    world.take_actions();
    const std::vector<ChunkAccess> accesses =
        write_first ? std::vector{writes(chunk, host), reads(chunk)} : std::vector{reads(chunk), writes(chunk, host)};
    Call& call = world.acquire(accesses);
    EXPECT_TRUE(call.refused_with<LogicError>());
    EXPECT_THAT(world.take_actions(), IsEmpty());
    EXPECT_FALSE(world.policy().chunk(chunk).pinned());
  }
}

// ---- The schedule, and the end

TEST(Policy, the_schedule_records_the_granted_accesses_of_a_step_in_order) {
  World world(4, 4);
  const ChunkId first = world.written(host);
  const ChunkId second = world.written(host);
  world.step_mark();  // what made the chunks is no part of the step
  Call& tensor = world.allocate(MiB);
  world.write(second, device);
  world.release(tensor);
  Call& pair = world.acquire({reads(first, host), reads(second)});
  world.release(pair);
  EXPECT_TRUE(world.acquire({reads(first, host), writes(second, host)}).waiting());
  world.step_mark();

  const Schedule* step = world.policy().forecast(device).schedule();
  ASSERT_NE(step, nullptr);
  ASSERT_EQ(step->size(), 1u) << "accesses to one chunk in a row are one, those on the host are not the device's";
  EXPECT_EQ((*step)[0].chunk, second);
  EXPECT_EQ((*step)[0].mode, Access::write);
  EXPECT_EQ((*step)[0].program_bytes, MiB);
}

TEST(Policy, what_the_program_does_beside_its_course_is_neither_recorded_nor_taken_for_it) {
  World world(4, 4);
  const ChunkId first = world.written(host);
  const ChunkId second = world.written(host);
  for (int step = 0; step < 2; ++step) {
    world.step_mark();
    world.read(first, device);
    Call& beside = world.acquire({reads(second)}, /*in_schedule=*/false);
    world.run();
    ASSERT_TRUE(beside.granted());
    world.release(beside);
    if (step == 1) {
      EXPECT_EQ(world.policy().forecast(device).cursor(), 1u);
    }
    world.read(second, device);
  }
  world.step_mark();
  ASSERT_EQ(world.policy().forecast(device).schedule()->size(), 2u);
}

TEST(Policy, gives_its_room_back_to_the_budgets_at_its_end) {
  Budget device_budget(device, 4 * MiB);
  Budget host_budget(host, 4 * MiB);
  Budget nvme_budget(nvme, 4 * MiB);
  {
    Policy policy({&device_budget, &host_budget, &nvme_budget}, 4 * MiB);
    for (const Tier home : all_tiers) {
      policy.add_chunk({.kind = Kind::variance, .index = 0, .bytes = MiB, .home = home, .room_bytes = {MiB, MiB, MiB}});
    }
    EXPECT_EQ(host_budget.used(Kind::variance), MiB);
  }
  for (const Budget* budget : {&device_budget, &host_budget, &nvme_budget}) {
    EXPECT_EQ(budget->used(), 0u);
    EXPECT_EQ(budget->used(Kind::variance), 0u);
  }
}

}  // namespace
}  // namespace terrace
