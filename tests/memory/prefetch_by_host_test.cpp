// What the policy brings from NVMe to the host, once it has seen a pass, as the device uses it next.

#include <algorithm>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::IsEmpty;
using testing::Not;
using Call = SimulatedDriver::Call;
using World = PrefetchWorld;

/// Chunks that rest on NVMe, are updated on the host and then used on the device forth and back.
struct ForthAndBack : World {
  ForthAndBack(int count, std::uint64_t device_mib, std::uint64_t host_mib, std::size_t prefetch_depth)
      : World(device_mib, host_mib, 64, prefetch_depth), all(chunks(count, nvme)), back(all.rbegin(), all.rend()) {
    step_mark();
    begin_pass(1);
    step();
    run();
    step();
    run();
  }
  /// An update before the first use of each, as announced.
  void step() {
    queue_updates();
    forth();
    pass(reads(back));
    run();
    step_mark();
  }
  void queue_updates() {
    for (const ChunkId chunk : all) set_update_queued(chunk, true);
    announce(all);
    run();
  }
  void forth() {
    for (const ChunkId chunk : all) {
      use(chunk, host, writing);
      use(chunk, device, reading);
    }
  }
  std::vector<ChunkId> all;
  std::vector<ChunkId> back;
};

/// Chunks that rest on NVMe and are used on the device, in passes that it has come to know. Something else is
/// announced.
struct KnownPass : World {
  KnownPass(int count, Access access, bool there_and_back) : World(2, 6, 64, 4) {
    for (int i = 0; i < count; ++i) all.push_back(chunk(nvme, access == writing ? Kind::gradient : Kind::parameter));
    used_ = pass_of(access, there_and_back);
    announce(access == writing ? all : states(1, nvme));
    learn(used_);
  }
  /// How many transfers a pass takes each way between NVMe and the rest.
  std::pair<int, int> read_and_written() {
    for (int warm = 0; warm < 2; ++warm) go();
    take_actions();
    go();
    int read = 0;
    int written = 0;
    for (const Action& action : take_actions()) {
      read += action.what == Action::What::move && action.from == nvme ? 1 : 0;
      written += action.what == Action::What::move && action.to == nvme ? 1 : 0;
    }
    return {read, written};
  }

  std::vector<ChunkId> all;

 private:
  void go() {
    for (const ChunkAccess& access : used_) {
      use(access.chunk, access.tier, access.mode);
      run();
    }
    step_mark();
  }
  std::vector<ChunkAccess> pass_of(Access access, bool there_and_back) const {
    std::vector<ChunkAccess> pass;
    for (const ChunkId chunk : all) pass.push_back({chunk, device, access});
    for (std::size_t i = 0; i < all.size(); ++i) {
      pass.push_back({there_and_back ? all[all.size() - 1 - i] : all[i], device, access});
    }
    return pass;
  }
  std::vector<ChunkAccess> used_;
};

TEST(Prefetch, what_the_device_reads_again_stays_on_the_host_as_far_as_that_has_room) {
  for (const bool there_and_back : {false, true}) {
    const int read = KnownPass(16, reading, there_and_back).read_and_written().first;
    EXPECT_LE(read, 32 - 2 * 5) << "of 32 uses: one of the host's six rooms has what is announced";
  }
}

TEST(Prefetch, what_the_device_writes_again_leaves_it_for_the_host_as_far_as_that_has_room) {
  for (const bool there_and_back : {false, true}) {
    const auto [read, written] = KnownPass(16, writing, there_and_back).read_and_written();
    EXPECT_LE(read, 32 - 2 * 6);
    EXPECT_LE(written, 32 - 2 * 6);
  }
}

TEST(Prefetch, what_the_device_is_about_to_write_is_not_read_for_the_update_after_that) {
  World world(2, 8, 64, 4);
  const auto parameters = world.chunks(4, host);
  const auto gradients = world.chunks(4, nvme);
  world.announce(gradients);
  std::vector<ChunkAccess> accesses = reads(parameters);
  for (const ChunkId gradient : gradients) accesses.push_back({gradient, device, writing});
  world.learn(accesses);
  world.run();
  for (const ChunkId gradient : gradients) world.use(gradient, host, reading);  // the update
  const auto others = world.chunks(4, nvme);
  Call& call = world.acquire(
      {{others[0], host, reading}, {others[1], host, reading}, {others[2], host, reading}, {others[3], host, reading}});
  world.run();
  for (const ChunkId gradient : gradients) ASSERT_EQ(world.state(gradient, host), CopyState::absent);
  world.release(call);
  for (const ChunkId other : others) world.discard(other);
  world.take_actions();
  for (const ChunkId parameter : parameters) {
    world.pass({{parameter, device, reading}});
    world.run();
  }
  const auto actions = world.take_actions();
  for (const ChunkId gradient : gradients) EXPECT_THAT(actions, Not(Contains(moves(gradient, nvme, host)))) << gradient;
}

TEST(Prefetch, what_cannot_be_read_is_not_tried_for_ever) {
  ForthAndBack world(20, 2, 5, 4);
  world.queue_updates();
  world.forth();
  int failures = 0;
  for (; !world.idle() && failures < 1000; ++failures) {
    world.unreported_vacates() > 0 ? world.report_vacate() : world.fail();
  }
  EXPECT_LT(failures, 100);
}

TEST(Prefetch, what_the_next_pass_needs_gives_way_to_what_this_one_does) {
  ForthAndBack world(8, 2, 5, 4);
  world.queue_updates();
  world.forth();
  const std::vector<Transfer>& coming = world.in_flight();
  EXPECT_TRUE(std::none_of(coming.begin(), coming.end(), [](const Transfer& each) {
    return each.from == nvme && each.to == host && each.priority != TransferPriority::early;
  })) << "all that backward needs first is still there";
  world.run();
  for (int used = 0; used < 3; ++used) EXPECT_TRUE(world.state(world.back[used], host) == CopyState::valid) << used;
}

TEST(Prefetch, what_is_on_its_way_to_the_host_is_not_read_a_second_time_for_the_device) {
  World world(2, 4, 16, 1);
  const auto chunks = world.chunks(8, nvme);
  world.announce({chunks[0]});
  ASSERT_TRUE(world.run_until([&] { return world.has_in_flight(chunks[0], nvme, host); }));
  world.take_actions();
  world.take_urgent();
  Call& call = world.acquire({{chunks[0], device, reading}});
  EXPECT_TRUE(call.waiting());
  EXPECT_THAT(world.take_actions(), IsEmpty());
  const auto urgent = world.take_urgent();
  ASSERT_EQ(urgent.size(), 1u);
  EXPECT_EQ(urgent[0].to, host);
  world.finish();
  EXPECT_THAT(world.take_actions(), Contains(moves(chunks[0], host, device)));
  world.run();
  EXPECT_TRUE(call.granted());
}

TEST(Prefetch, who_waits_for_a_transfer_to_the_host_that_fails_reads_it_again) {
  World world(2, 4, 16, 1);
  const auto chunks = world.chunks(8, nvme);
  world.announce({chunks[0]});
  ASSERT_TRUE(world.run_until([&] { return world.has_in_flight(chunks[0], nvme, host); }));
  Call& call = world.acquire({{chunks[0], device, reading}});
  world.fail();
  world.run();
  EXPECT_TRUE(call.granted());
}

TEST(Prefetch, the_room_of_what_comes_by_the_host_is_not_given_to_what_is_used_later) {
  ForthAndBack world(12, 2, 4, 4);
  world.take_actions();
  world.queue_updates();
  world.forth();
  for (const ChunkId chunk : world.back) {
    Call& call = world.acquire({{chunk, device, reading}});
    // Transfers end one at a time, so that what comes by the host is still on its way when it is wanted.
    while (!call.granted()) {
      ASSERT_FALSE(world.idle());
      world.unreported_vacates() > 0 ? world.report_vacate() : world.finish();
    }
    world.release(call);
  }
  world.run();
  const auto actions = world.take_actions();
  for (const ChunkId chunk : world.back) {
    const auto brought = std::count(actions.begin(), actions.end(), moves(chunk, host, device)) +
                         std::count(actions.begin(), actions.end(), moves(chunk, nvme, device));
    EXPECT_LE(brought, 3) << "chunk " << chunk << ": forth, back, and once more where a nearer one came late";
  }
}

TEST(Prefetch, who_writes_what_a_fetch_ahead_of_need_reads_makes_that_urgent) {
  World world(4, 3, 16, 1);
  const auto chunks = world.chunks(6, nvme);
  world.use(chunks[0], device, reading);
  ASSERT_EQ(world.state(chunks[0], host), CopyState::absent);
  world.announce({chunks[0]});
  ASSERT_TRUE(world.run_until(
      [&] { return world.has_in_flight(chunks[0], nvme, host) || world.has_in_flight(chunks[0], device, host); }));
  world.take_urgent();
  Call& call = world.acquire({{chunks[0], device, writing}});
  EXPECT_TRUE(call.waiting());
  const auto urgent = world.take_urgent();
  ASSERT_EQ(urgent.size(), 1u);
  EXPECT_EQ(urgent[0].to, host);
  world.run();
  EXPECT_TRUE(call.granted());
}

TEST(Prefetch, comes_to_the_host_by_the_link_that_has_less_to_do) {
  for (const bool device_is_busy : {false, true}) {
    World world(4, 3, 16, 1);
    const auto chunks = world.chunks(3, nvme);
    const ChunkId busy = chunks[1];
    world.use(busy, device, writing);
    const ChunkId wanted = chunks[0];
    world.chunks(3, nvme);  // the host's copies of the first three leave
    world.use(wanted, device, reading);
    ASSERT_EQ(world.state(wanted, host), CopyState::absent);
    world.run();
    world.take_actions();
    if (device_is_busy) {
      // The device's only copy of it begins to leave.
      world.allocate(3 * MiB);
      ASSERT_EQ(world.in_flight().size(), 1u);
      ASSERT_EQ(world.in_flight()[0].from, device);
    }
    Call& call = world.acquire({{wanted, host, reading}});
    while (!call.granted()) {
      // What the device is busy with goes on.
      const auto& coming = world.in_flight();
      const auto other =
          std::find_if(coming.begin(), coming.end(), [&](const Transfer& each) { return each.chunk != busy; });
      ASSERT_TRUE(world.unreported_vacates() > 0 || other != coming.end());
      world.unreported_vacates() > 0 ? world.report_vacate()
                                     : world.finish(static_cast<std::size_t>(other - coming.begin()));
    }
    EXPECT_THAT(world.take_actions(), Contains(moves(wanted, device_is_busy ? nvme : device, host)));
    world.run();
  }
}

}  // namespace
}  // namespace terrace
