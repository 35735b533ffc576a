// Why a request waits.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/policy_world.h"

namespace terrace {

void PrintTo(const Wait& wait, std::ostream* out) {
  *out << name_of(wait.cause) << (wait.chunk ? " of chunk " + std::to_string(*wait.chunk) : "");
}

namespace {

using Call = SimulatedDriver::Call;
using World = PolicyWorld;

class PolicyWaits : public testing::Test {
 protected:
  static Wait wait_of(World& world, const Call& call) {
    EXPECT_TRUE(call.waiting()) << call.error_text();
    return world.policy().wait_of(call.request);
  }
};

TEST_F(PolicyWaits, for_bytes_on_their_way_from_the_host) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  EXPECT_EQ(wait_of(world, world.acquire({reads(chunk)})), (Wait{StallCause::host_to_device, chunk}));
}

TEST_F(PolicyWaits, for_bytes_on_their_way_from_nvme_wherever_they_go) {
  for (const Tier to : {host, device}) {
    World world(2, 2, 2);
    const ChunkId chunk = world.written(nvme);
    EXPECT_EQ(wait_of(world, world.acquire({reads(chunk, to)})), (Wait{StallCause::nvme_to_host, chunk}));
  }
}

TEST_F(PolicyWaits, for_bytes_on_their_way_from_the_device) {
  World world(2, 2);
  const ChunkId chunk = world.written(host);
  world.write(chunk, device);
  EXPECT_EQ(wait_of(world, world.acquire({reads(chunk, host)})), (Wait{StallCause::device_to_host, chunk}));
}

TEST_F(PolicyWaits, for_a_chunk_to_be_zeroed_as_for_one_on_its_way_to_the_device) {
  for (const Tier on : {host, device}) {
    World world(2, 2, 2);
    const ChunkId chunk = world.fresh(nvme);
    EXPECT_EQ(wait_of(world, world.acquire({writes(chunk, on)})), (Wait{StallCause::host_to_device, chunk}));
  }
}

TEST_F(PolicyWaits, for_the_first_operand_that_is_missing_and_then_the_next) {
  World world(4, 4, 4);
  const ChunkId there = world.written(host);
  const ChunkId on_nvme = world.written(nvme);
  const ChunkId on_host = world.written(host);
  world.read(there, device);
  Call& call = world.acquire({reads(there), reads(on_nvme), reads(on_host)});
  EXPECT_EQ(wait_of(world, call), (Wait{StallCause::nvme_to_host, on_nvme}));
  world.finish(0);
  EXPECT_EQ(wait_of(world, call), (Wait{StallCause::host_to_device, on_host}));
  world.finish(0);
  EXPECT_TRUE(call.granted());
}

TEST_F(PolicyWaits, for_room_where_something_has_to_leave_first) {
  World world(1, 2);
  const ChunkId dirty = world.written(host);
  const ChunkId wanted = world.written(host);
  world.write(dirty, device);
  Call& call = world.acquire({reads(wanted)});
  EXPECT_EQ(wait_of(world, call), (Wait{StallCause::device_room, wanted}));
  world.finish(0);
  EXPECT_EQ(wait_of(world, call), (Wait{StallCause::device_room, wanted})) << "the room is not given up yet";
  world.report_vacate(0);
  EXPECT_EQ(wait_of(world, call), (Wait{StallCause::host_to_device, wanted}));
}

TEST_F(PolicyWaits, for_room_on_the_host_that_what_rests_on_nvme_has_to_leave) {
  World world(1, 1, 2);
  const ChunkId dirty = world.fresh(nvme);
  const ChunkId wanted = world.fresh(nvme);
  world.write(dirty, host);
  EXPECT_EQ(wait_of(world, world.acquire({writes(wanted, host)})), (Wait{StallCause::host_room, wanted}));
}

TEST_F(PolicyWaits, for_room_for_a_tensor_of_the_program) {
  World world(1, 2);
  world.write(world.written(host), device);
  EXPECT_EQ(wait_of(world, world.allocate(MiB)), (Wait{StallCause::device_room, std::nullopt}));
}

TEST_F(PolicyWaits, for_whoever_still_reads_what_is_to_be_written) {
  World world(1, 1, 2);
  const ChunkId chunk = world.fresh(nvme);
  world.write(chunk, host);
  Call& leaving = world.acquire({reads(world.fresh(nvme), host)});  // it has to be written back first
  Call& writer = world.acquire({writes(chunk, host)});
  EXPECT_EQ(wait_of(world, leaving).cause, StallCause::host_room);
  EXPECT_EQ(wait_of(world, writer).cause, StallCause::host_room);
}

TEST_F(PolicyWaits, for_what_the_first_of_its_lane_waits_for_until_its_turn_comes) {
  World world(2, 4, 4);
  const ChunkId first = world.written(nvme);
  const ChunkId second = world.written(host);
  world.acquire({reads(first)});
  Call& behind = world.acquire({reads(second)});
  EXPECT_EQ(wait_of(world, behind), (Wait{StallCause::nvme_to_host, first}));
  world.finish(0);
  EXPECT_EQ(wait_of(world, behind), (Wait{StallCause::host_to_device, second}));
}

TEST_F(PolicyWaits, for_its_own_bytes_where_they_are_on_their_way_already) {
  World world(2, 4, 4);
  const ChunkId first = world.written(nvme);
  const ChunkId shared = world.written(host);
  world.acquire({reads(first), reads(shared)});
  EXPECT_EQ(wait_of(world, world.acquire({reads(shared)})), (Wait{StallCause::host_to_device, shared}));
}

}  // namespace
}  // namespace terrace
