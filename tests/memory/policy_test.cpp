#include "memory/policy.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;
using Call = SimulatedDriver::Call;

constexpr std::uint64_t MiB = 1024 * 1024;
constexpr auto device = Tier::device;
constexpr auto host = Tier::host;
constexpr auto nvme = Tier::nvme;

constexpr Access reads(ChunkId chunk, Tier tier = device) { return {chunk, tier, AccessMode::read}; }
constexpr Access writes(ChunkId chunk, Tier tier = device) { return {chunk, tier, AccessMode::write}; }

/// Budgets in MiB; chunks of one MiB, numbered as they are registered.
class World : public SimulatedDriver {
 public:
  World(std::uint64_t device_mib, std::uint64_t host_mib, std::uint64_t nvme_mib = 0,
        std::uint64_t device_chunks_mib = 1024)
      : SimulatedDriver({device_mib * MiB, host_mib * MiB, nvme_mib * MiB}, device_chunks_mib * MiB) {}

  /// A chunk that was never written.
  ChunkId fresh(Tier home, std::uint64_t mib = 1, Kind kind = Kind::parameter) {
    return add_chunk({.kind = kind,
                      .index = static_cast<std::uint32_t>(policy().chunk_count()),
                      .bytes = mib * MiB,
                      .home = home,
                      .room_bytes = {mib * MiB, mib * MiB, mib * MiB}});
  }

  /// A chunk whose newest bytes are at home, and only there.
  ChunkId written(Tier home, Kind kind = Kind::parameter) {
    const ChunkId chunk = fresh(home, 1, kind);
    write(chunk, home == nvme ? host : home);
    if (home == nvme) push_out(chunk);
    EXPECT_EQ(state(chunk, home), CopyState::valid);
    take_actions();
    return chunk;
  }

  /// Has the copy on the host leave it, by the budget.
  void push_out(ChunkId chunk) {
    const std::uint64_t room = budget(host).free();
    EXPECT_TRUE(budget(host).try_reserve(Kind::other, room));
    const ChunkId other = fresh(nvme);
    Call& call = acquire({reads(other, host)});
    run();
    EXPECT_TRUE(call.granted()) << call.error_text();
    release(call);
    discard(other);
    run();
    budget(host).release(Kind::other, room);
    EXPECT_EQ(state(chunk, host), CopyState::absent);
  }
};

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
    const std::vector<Access> accesses =
        write_first ? std::vector{writes(chunk, host), reads(chunk)} : std::vector{reads(chunk), writes(chunk, host)};
    Call& call = world.acquire(accesses);
    EXPECT_TRUE(call.refused_with<LogicError>());
    EXPECT_THAT(world.take_actions(), IsEmpty());
    EXPECT_FALSE(world.policy().chunk(chunk).pinned());
  }
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

// ---- Who waits, and who is refused

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
  EXPECT_THAT(refused.error_text(), HasSubstr("activation 1MiB"));
  EXPECT_THAT(refused.error_text(), HasSubstr("2MiB of it cannot leave now"));
  EXPECT_THAT(refused.error_text(), HasSubstr("raise device.memory to at least 4MiB"));
  EXPECT_TRUE(holder.granted());
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
  EXPECT_THAT(text, HasSubstr("raise device.memory to at least " + std::to_string(odd + 100 * MiB) + "B"));
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
  std::vector<Access> operands;
  for (int i = 0; i < 3; ++i) operands.push_back(reads(world.written(host)));
  Call& call = world.acquire(operands);
  world.run();
  EXPECT_TRUE(call.refused_with<OutOfMemory>());
  for (const Access& access : operands) EXPECT_FALSE(world.policy().chunk(access.chunk).pinned());
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
  EXPECT_EQ(world.budget(device).used(Kind::activation), 2 * MiB);
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

// ---- Failures

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
  EXPECT_EQ((*step)[0].mode, AccessMode::write);
  EXPECT_EQ((*step)[0].program_bytes, MiB);
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
