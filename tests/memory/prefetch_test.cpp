/// What the policy does ahead of need, once it has seen a pass.

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;
using Call = SimulatedDriver::Call;

constexpr std::uint64_t MiB = 1024 * 1024;
constexpr auto device = Tier::device;
constexpr auto host = Tier::host;
constexpr auto nvme = Tier::nvme;
constexpr auto reading = Access::read;
constexpr auto writing = Access::write;

/// Budgets in MiB, chunks of one MiB. A pass is a list of accesses on the device, one after the other.
class World : public SimulatedDriver {
 public:
  World(std::uint64_t device_mib, std::uint64_t host_mib, std::uint64_t nvme_mib, std::size_t prefetch_depth,
        std::uint64_t device_chunk_limit = unlimited)
      : SimulatedDriver({device_mib * MiB, host_mib * MiB, nvme_mib * MiB}, device_chunk_limit, prefetch_depth) {}

  ChunkId chunk(Tier home) {
    const ChunkId id = add_chunk({.kind = Kind::parameter,
                                  .index = static_cast<std::uint32_t>(policy().chunk_count()),
                                  .bytes = MiB,
                                  .home = home,
                                  .room_bytes = {MiB, MiB, MiB}});
    use(id, home == nvme ? host : home, writing);
    return id;
  }
  std::vector<ChunkId> chunks(int count, Tier home) {
    std::vector<ChunkId> all;
    for (int i = 0; i < count; ++i) all.push_back(chunk(home));
    return all;
  }

  void pass(const std::vector<ChunkAccess>& accesses) {
    for (const ChunkAccess& access : accesses) use(access.chunk, access.tier, access.mode);
  }
  /// Has the pass recorded, and begins the next.
  void learn(const std::vector<ChunkAccess>& accesses) {
    step_mark();
    begin_pass(1);
    pass(accesses);
    step_mark();
    give_up_rooms();
  }
  /// Reports what is vacated, and leaves transfers where they are.
  void give_up_rooms() {
    while (unreported_vacates() > 0) report_vacate();
  }
  /// Carries out one thing after the other until `stop()`; false where nothing is left before.
  template <class Stop>
  bool run_until(Stop&& stop) {
    while (!stop()) {
      if (idle()) return false;
      unreported_vacates() > 0 ? report_vacate() : finish();
    }
    return true;
  }
  bool has_in_flight(ChunkId chunk, Tier from, Tier to) const {
    return std::any_of(in_flight().begin(), in_flight().end(),
                       [&](const Transfer& each) { return each.chunk == chunk && each.from == from && each.to == to; });
  }
  std::uint64_t stalls() { return policy().demand_fetches(); }
};

std::vector<ChunkAccess> reads(const std::vector<ChunkId>& chunks) {
  std::vector<ChunkAccess> accesses;
  for (const ChunkId chunk : chunks) accesses.push_back({chunk, device, reading});
  return accesses;
}

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

TEST(Eviction, takes_the_copy_whose_next_use_is_furthest_counted_around_the_end) {
  World world(3, 16, 0, 1);
  const auto chunks = world.chunks(5, host);
  const auto [a, b, c, d, e] = std::tuple(chunks[0], chunks[1], chunks[2], chunks[3], chunks[4]);
  // After d, b is used at once, a in the next pass, c not before a.
  const std::vector<ChunkAccess> accesses = reads({a, b, c, d, b, a, c});
  world.learn(accesses);
  world.run();
  world.pass(reads({a, b, c}));
  world.run();
  // Of a, b and c the one that leaves for d is c, though it was used last.
  EXPECT_EQ(world.state(c, device), CopyState::absent);
  EXPECT_EQ(world.state(a, device), CopyState::valid);
  EXPECT_EQ(world.state(b, device), CopyState::valid);
  EXPECT_EQ(world.state(d, device), CopyState::valid) << "it was fetched ahead";
  (void)e;
}

TEST(Eviction, what_the_pass_is_done_with_is_written_home_before_its_room_is_needed) {
  World world(8, 16, 0, 1);
  const ChunkId gradient = world.chunk(host);
  const ChunkId other = world.chunk(host);
  const std::vector<ChunkAccess> accesses{{gradient, device, writing}, {other, device, reading}};
  world.learn(accesses);
  world.run();
  world.take_actions();
  Call& call = world.acquire({{gradient, device, writing}});
  ASSERT_TRUE(call.granted());
  world.release(call);
  EXPECT_THAT(world.take_actions(), Contains(moves(gradient, device, host)));
  EXPECT_EQ(world.in_flight().back().priority, TransferPriority::write_back);
  world.run();
  EXPECT_EQ(world.state(gradient, device), CopyState::valid) << "it stays as a clean copy";
  EXPECT_EQ(world.state(gradient, host), CopyState::valid);
}

/// Follows a pass that writes the first chunk: it is written home after the last of these writes, and not before.
void expect_written_home_after_the_last_write(const std::vector<Access>& modes) {
  World world(8, 16, 0, 1);
  const ChunkId gradient = world.chunk(host);
  const ChunkId other = world.chunk(host);
  std::vector<ChunkAccess> pass;
  for (const Access mode : modes) pass.push_back({mode == writing ? gradient : other, device, mode});
  world.learn(pass);
  world.run();
  world.take_actions();
  std::size_t left = static_cast<std::size_t>(std::count(modes.begin(), modes.end(), writing));
  for (const ChunkAccess& access : pass) {
    Call& call = world.acquire({access});
    ASSERT_TRUE(call.granted());
    world.release(call);
    if (access.chunk == gradient) --left;
    const auto actions = world.take_actions();
    if (left > 0) {
      EXPECT_THAT(actions, Not(Contains(moves(gradient, device, host)))) << left << " writes to come";
    } else if (access.chunk == gradient) {
      EXPECT_THAT(actions, Contains(moves(gradient, device, host)));
    }
    world.run();
  }
}

TEST(Eviction, what_the_pass_writes_again_is_not_written_home_in_between) {
  expect_written_home_after_the_last_write({writing, reading, writing});
}

TEST(Eviction, what_the_pass_writes_several_times_in_a_row_is_written_home_after_the_last) {
  expect_written_home_after_the_last_write({writing, writing, writing, reading});
}

/// Gradients at home on NVMe, updated on the host in order, and made on the device in the opposite one.
struct Backward : World {
  Backward(int count, std::uint64_t host_mib) : World(4, host_mib, 16, 4) {
    gradients = chunks(count, nvme);
    for (const ChunkId gradient : gradients) discard(gradient);
    run();
    announce(gradients);
    std::vector<ChunkAccess> accesses;
    for (auto gradient = gradients.rbegin(); gradient != gradients.rend(); ++gradient) {
      accesses.push_back({*gradient, device, writing});
    }
    learn(accesses);
    run();
    pass_updates();
    take_actions();
    pass(accesses);
    run();
  }
  /// The update reads the gradients on the host; then they are dead.
  void pass_updates() {
    for (const ChunkId gradient : gradients) {
      use(gradient, host, reading);
      discard(gradient);
      run();
    }
  }

  std::vector<ChunkId> gradients;
};

TEST(Eviction, what_the_update_needs_stays_on_the_host_instead_of_going_home_to_nvme) {
  Backward world(3, 4);
  const auto actions = world.take_actions();
  for (const ChunkId gradient : world.gradients) {
    EXPECT_THAT(actions, Contains(moves(gradient, device, host)));
    EXPECT_EQ(world.state(gradient, host), CopyState::valid);
    EXPECT_EQ(world.state(gradient, nvme), CopyState::reserved);
  }
  world.pass_updates();
  EXPECT_EQ(world.policy().demand_fetches(), 0u);
}

TEST(Eviction, what_the_update_needs_last_passes_the_host_on_its_way_to_nvme) {
  Backward world(5, 2);
  const auto actions = world.take_actions();
  for (int i = 0; i < 5; ++i) {
    const ChunkId gradient = world.gradients[i];
    EXPECT_THAT(actions, Contains(moves(gradient, device, host))) << i;
    EXPECT_EQ(world.state(gradient, host), i < 2 ? CopyState::valid : CopyState::absent) << i;
    EXPECT_EQ(world.state(gradient, nvme), i < 2 ? CopyState::reserved : CopyState::valid) << i;
    EXPECT_THAT(actions, Not(Contains(moves(gradient, nvme, host)))) << i << " is brought back too early";
    EXPECT_THAT(actions, Not(Contains(moves(gradient, device, nvme)))) << i;
  }
}

TEST(Eviction, a_chunk_that_fails_to_reach_the_host_on_its_way_to_nvme_stays_where_it_is) {
  Backward world(3, 4);
  world.pass_updates();
  world.step_mark();
  Call& call = world.acquire({{world.gradients[2], device, writing}});
  world.run();
  world.release(call);
  ASSERT_TRUE(world.has_in_flight(world.gradients[2], device, host));
  world.fail();
  EXPECT_EQ(world.state(world.gradients[2], device), CopyState::valid);
  EXPECT_EQ(world.state(world.gradients[2], host), CopyState::absent);
  world.use(world.gradients[2], host, reading);
}

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

TEST(Prefetch, what_the_device_uses_next_is_brought_from_nvme_to_the_host_where_there_is_more_room) {
  ForthAndBack world(20, 2, 5, 4);
  world.queue_updates();
  world.forth();
  world.run();
  world.take_actions();
  for (const ChunkId chunk : world.back) {
    world.use(chunk, device, reading);
    world.run();
  }
  const auto actions = world.take_actions();
  for (const ChunkId chunk : world.all) EXPECT_THAT(actions, Not(Contains(moves(chunk, nvme, device))));
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
