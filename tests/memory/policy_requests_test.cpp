// Who waits, and who is refused with which message.
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
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using Call = SimulatedDriver::Call;
using World = PolicyWorld;

TEST(Policy, is_refused_when_only_pinned_copies_are_left) {
  World world(3, 8);
  const ChunkId pinned = world.written(host, Kind::momentum);
  const ChunkId evictable = world.written(host);
  const ChunkId wanted = world.fresh(host, 2);
  ASSERT_TRUE(world.allocate(MiB).granted());
  Call& holder = world.acquire({reads(pinned)});
  world.run();
  ASSERT_TRUE(holder.granted());
  world.read(evictable, device);
  Call& refused = world.acquire({reads(wanted)});
  world.run();
  ASSERT_TRUE(refused.refused_with<OutOfMemory>());
  // Who holds what, what cannot leave, and the smallest setting that is enough.
  EXPECT_THAT(refused.error_text(), HasSubstr("device: 2MiB for parameter chunk 2 do not fit"));
  EXPECT_THAT(refused.error_text(), HasSubstr("momentum 1MiB"));
  EXPECT_THAT(refused.error_text(), HasSubstr("other 1MiB"));
  EXPECT_THAT(refused.error_text(), HasSubstr("2MiB of it cannot leave now"));
  EXPECT_THAT(refused.error_text(), HasSubstr("raise device.memory to at least 4MiB"));
  EXPECT_TRUE(holder.granted());
}

TEST(Policy, is_refused_with_what_rests_on_the_device_where_something_does) {
  for (const Tier home : {host, device}) {
    World world(3, 8);
    world.written(home, Kind::momentum);
    world.written(home, Kind::variance);
    Call& refused = world.acquire({reads(world.fresh(host, 4))});
    world.run();
    ASSERT_TRUE(refused.refused_with<OutOfMemory>());
    EXPECT_EQ(refused.error_text().find("let less than 2MiB of chunks rest there") != std::string::npos, home == device)
        << refused.error_text();
  }
}

/// The call that `scene` ends with is granted by a device of `enough_mib`, and each smaller one names that size.
template <class Scene>
void expect_smallest_device_memory(std::uint64_t enough_mib, std::uint64_t least_mib, Scene&& scene) {
  World enough(enough_mib, 16);
  Call& granted = scene(enough);
  EXPECT_TRUE(granted.granted()) << granted.error_text();
  for (std::uint64_t mib = least_mib; mib < enough_mib; ++mib) {
    World less(mib, 16);
    Call& refused = scene(less);
    EXPECT_TRUE(refused.refused_with<OutOfMemory>()) << mib;
    EXPECT_THAT(refused.error_text(), HasSubstr("at least " + format_bytes(enough_mib * MiB))) << mib;
  }
}

TEST(Policy, the_setting_that_a_refusal_names_is_enough_and_the_smallest) {
  expect_smallest_device_memory(4, 2, [](World& world) -> Call& {
    const ChunkId pinned = world.written(host);
    const ChunkId wanted = world.fresh(host, 2);
    EXPECT_TRUE(world.allocate(MiB).granted());
    world.acquire({reads(pinned)});
    world.run();
    Call& call = world.acquire({reads(wanted)});
    world.run();
    return call;
  });
}

TEST(Policy, the_setting_that_a_refusal_names_covers_all_operands_of_the_request) {
  expect_smallest_device_memory(5, 1, [](World& world) -> Call& {
    const ChunkId large = world.fresh(host, 2);
    const ChunkId first = world.written(host);
    const ChunkId second = world.written(host);
    const ChunkId third = world.written(host);
    world.read(second, device);
    Call& call = world.acquire({reads(large), reads(first), reads(second), reads(third), reads(first)});
    world.run();
    return call;
  });
}

TEST(Policy, the_setting_that_a_refused_tensor_names_is_enough_and_the_smallest) {
  expect_smallest_device_memory(6, 2, [](World& world) -> Call& {
    const ChunkId pinned = world.written(host);
    const ChunkId evictable = world.written(host);
    world.read(evictable, device);
    world.acquire({writes(pinned)});
    world.run();
    Call& call = world.allocate(5 * MiB);
    world.run();
    return call;
  });
}

TEST(Policy, the_setting_that_a_refusal_names_is_exact) {
  World world(200, 16);
  const std::uint64_t odd = 150 * MiB + 64;
  ASSERT_TRUE(world.allocate(odd).granted());
  const std::string text = world.allocate(100 * MiB).error_text();
  EXPECT_THAT(text, HasSubstr("raise device.memory to at least " + format_bytes_exactly(odd + 100 * MiB)));
}

TEST(Policy, chunks_on_the_device_stay_within_their_limit) {
  World world(8, 8, 0, 2);
  std::vector<ChunkId> chunks;
  for (int i = 0; i < 3; ++i) chunks.push_back(world.written(host));
  world.read(chunks[0], device);
  world.read(chunks[1], device);
  world.take_actions();
  world.read(chunks[2], device);
  EXPECT_THAT(world.take_actions(), ElementsAre(vacates(chunks[0], device), moves(chunks[2], host, device)));

  Call& too_many = world.acquire({reads(chunks[0]), reads(chunks[1]), reads(chunks[2])});
  world.run();
  ASSERT_TRUE(too_many.refused_with<OutOfMemory>());
  EXPECT_THAT(too_many.error_text(), HasSubstr("raise device.chunks"));
  EXPECT_THAT(too_many.error_text(), HasSubstr("at least 3MiB"));
  EXPECT_TRUE(world.allocate(6 * MiB).granted()) << "the rest of the device is the program's";
  EXPECT_EQ(world.policy().peak_chunk_bytes(device), 2 * MiB);
}

TEST(Policy, a_chunk_that_cannot_rest_at_home_is_not_registered) {
  World world(2, 2);
  world.written(host);
  world.written(host);
  try {
    world.fresh(host);
    FAIL() << "the host is full";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.what(), HasSubstr("host: 1MiB for parameter chunk 2 to rest there do not fit"));
    EXPECT_THAT(error.hint(), HasSubstr("raise host.memory to at least 3MiB"));
  }
  EXPECT_EQ(world.policy().chunk_count(), 2u);
  EXPECT_EQ(world.fresh(device), 2u);
}

TEST(Policy, what_a_chunk_needs_to_rest_is_told_with_what_cannot_be_evicted_for_it) {
  World world(4, 2, 4);
  const ChunkId cached = world.written(nvme);
  world.read(cached, host);
  try {
    world.fresh(host, 2);
    FAIL() << "a registration evicts nothing";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.hint(), HasSubstr("raise host.memory to at least 3MiB"));
  }
}

TEST(Policy, nobody_is_made_to_wait_for_a_pin) {
  World world(3, 8);
  const ChunkId pinned = world.written(host);
  const ChunkId old = world.written(host);
  const ChunkId wanted = world.written(host);
  Call& holder = world.acquire({reads(pinned)});
  world.run();
  world.read(old, device);
  ASSERT_TRUE(world.allocate(MiB).granted());
  Call& head = world.acquire({reads(wanted)});
  world.run();
  EXPECT_TRUE(head.granted()) << "while the other pin is still held";
  EXPECT_TRUE(holder.granted());
}

TEST(Policy, what_is_there_is_granted_past_those_who_wait) {
  World world(2, 4);
  const ChunkId there = world.written(host);
  const ChunkId missing = world.written(host);
  Call& waiting = world.acquire({reads(missing)});
  ASSERT_TRUE(waiting.waiting());
  EXPECT_TRUE(world.acquire({reads(there, host)}).granted());
  EXPECT_TRUE(waiting.waiting());
}

TEST(Policy, only_the_first_of_the_queue_holds_pins_and_asks_for_room) {
  World world(4, 4);
  const ChunkId first = world.written(host);
  const ChunkId second = world.written(host);
  Call& head = world.acquire({reads(first)});
  Call& next = world.acquire({reads(second), reads(second, host)});
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(first, host, device)));
  EXPECT_EQ(world.policy().chunk(first).at(device).pins, 1u);
  EXPECT_FALSE(world.policy().chunk(second).pinned()) << "not even what is there";
  EXPECT_EQ(world.policy().waiting(), 2u);
  world.finish();
  EXPECT_TRUE(head.granted());
  EXPECT_TRUE(next.waiting());
  EXPECT_THAT(world.take_actions(), ElementsAre(moves(second, host, device)));
  EXPECT_EQ(world.policy().chunk(second).at(host).pins, 1u);
}

TEST(Policy, a_refused_request_gives_back_its_pins) {
  World world(2, 8);
  std::vector<ChunkAccess> operands;
  for (int i = 0; i < 3; ++i) operands.push_back(reads(world.written(host)));
  Call& call = world.acquire(operands);
  world.run();
  EXPECT_TRUE(call.refused_with<OutOfMemory>());
  for (const ChunkAccess& access : operands) EXPECT_FALSE(world.policy().chunk(access.chunk).pinned());
  Call& tensor = world.allocate(2 * MiB);
  world.run();
  EXPECT_TRUE(tensor.granted());
}

TEST(Policy, a_tensor_of_the_program_is_served_by_evicting_chunks) {
  World world(2, 4);
  const ChunkId clean = world.written(host);
  const ChunkId dirty = world.written(host);
  world.read(clean, device);
  world.write(dirty, device);
  world.take_actions();
  Call& tensor = world.allocate(2 * MiB);
  EXPECT_TRUE(tensor.waiting());
  world.run();
  EXPECT_TRUE(tensor.granted());
  EXPECT_THAT(world.take_actions(),
              UnorderedElementsAre(vacates(clean, device), moves(dirty, device, host), vacates(dirty, device)));
  EXPECT_EQ(world.budget(device).used(Kind::other), 2 * MiB);
  EXPECT_EQ(world.policy().chunk_bytes(device), 0u);
}

TEST(Policy, a_tensor_larger_than_what_can_leave_is_refused) {
  World world(2, 4);
  const ChunkId pinned = world.written(host);
  world.acquire({reads(pinned)});
  world.run();
  Call& tensor = world.allocate(2 * MiB);
  ASSERT_TRUE(tensor.refused_with<OutOfMemory>());
  EXPECT_THAT(tensor.error_text(), HasSubstr("2MiB for a tensor of the program do not fit"));
  EXPECT_THAT(tensor.error_text(), HasSubstr("parameter 1MiB"));
  EXPECT_THAT(tensor.error_text(), HasSubstr("at least 3MiB"));
  EXPECT_THAT(tensor.error_text(), HasSubstr("construct"));
}

}  // namespace
}  // namespace terrace
