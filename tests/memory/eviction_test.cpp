// What the policy has leave a tier, and when, once it has seen a pass.

#include <algorithm>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::Not;
using Call = SimulatedDriver::Call;
using World = PrefetchWorld;

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

TEST(Eviction, keeps_what_stays_as_it_is_rather_than_what_the_step_will_have_updated) {
  World world(3, 16, 0, 1);
  const auto chunks = world.chunks(4, host);
  const auto [trained, frozen, other, last] = std::tuple(chunks[0], chunks[1], chunks[2], chunks[3]);
  world.announce({trained});
  // The trained one is used again sooner, but not as it is now.
  const std::vector<ChunkAccess> accesses = reads({trained, frozen, other, last});
  world.learn(accesses);
  world.run();
  world.pass(accesses);
  EXPECT_EQ(world.state(trained, device), CopyState::absent);
  EXPECT_EQ(world.state(frozen, device), CopyState::valid);
}

TEST(Eviction, a_gradient_takes_the_room_of_a_parameter_that_the_pass_is_done_with) {
  constexpr int layers = 6;
  World world(4, 32, 0, 2);
  const auto parameters = world.chunks(layers, host);
  std::vector<ChunkId> gradients;
  std::vector<ChunkAccess> pass = reads(parameters);
  for (int i = 0; i < layers; ++i) gradients.push_back(world.chunk(host, Kind::gradient));
  for (int i = layers; i-- > 0;) {
    pass.push_back({parameters[i], device, reading});
    pass.push_back({gradients[i], device, writing});
  }
  const auto update = [&] {
    for (const ChunkId parameter : parameters) world.set_update_queued(parameter, true);
    world.step_mark();
    for (int i = 0; i < layers; ++i) {
      world.write(parameters[i], host);
      world.set_update_queued(parameters[i], false);
      world.discard(gradients[i]);
    }
    world.run();
  };
  world.announce(parameters);
  update();
  world.begin_pass(1);
  world.pass(pass);
  update();
  for (std::size_t at = 0; at < pass.size(); ++at) {
    world.run();
    if (pass[at].mode == writing) {
      EXPECT_EQ(world.state(pass[at].chunk, device), CopyState::valid) << "room was made and filled ahead";
    }
    const std::uint64_t stalls_before = world.stalls();
    world.pass({pass[at]});
    EXPECT_EQ(world.stalls(), stalls_before) << at << ": what is read was given up for a gradient";
  }
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

std::vector<ChunkAccess> written_in_reverse(const std::vector<ChunkId>& chunks) {
  std::vector<ChunkAccess> accesses;
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) accesses.push_back({*chunk, device, writing});
  return accesses;
}

/// Gradients at home on NVMe, updated on the host in order, and made on the device in the opposite one.
struct Backward : World {
  Backward(int count, std::uint64_t host_mib) : World(4, host_mib, 16, 4) {
    gradients = chunks(count, nvme);
    for (const ChunkId gradient : gradients) discard(gradient);
    run();
    announce(gradients);
    const std::vector<ChunkAccess> accesses = written_in_reverse(gradients);
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

/// Of seven, the host has room for the two that are updated first, and half of the device for the two after them.
struct LongBackward : Backward {
  LongBackward() : Backward(7, 2) {}

  std::vector<ChunkId> part(std::ptrdiff_t from, std::ptrdiff_t to) const {
    return {gradients.begin() + from, gradients.begin() + to};
  }
  const std::vector<ChunkId> first = part(0, 2);
  const std::vector<ChunkId> waiting = part(2, 4);
  const std::vector<ChunkId> last = part(4, 7);
};

TEST(Eviction, of_what_a_pass_writes_again_one_of_every_few_stays_on_the_host_as_far_as_that_has_room) {
  World world(2, 4, 16, 4);
  const auto gradients = world.chunks(8, nvme);
  world.announce(gradients);
  std::vector<ChunkAccess> micro_batch;
  for (const ChunkId gradient : gradients) micro_batch.push_back({gradient, device, writing});
  std::vector<ChunkAccess> twice = micro_batch;
  twice.insert(twice.end(), micro_batch.begin(), micro_batch.end());
  world.learn(twice);
  world.run();
  for (const ChunkId gradient : gradients) {
    world.use(gradient, host, reading);  // the update
    world.discard(gradient);
    world.run();
  }
  world.take_actions();
  for (const ChunkAccess& access : micro_batch) {
    world.pass({access});
    world.run();
  }
  const auto actions = world.take_actions();
  for (std::size_t i = 0; i < 6; ++i) {  // the device has had the last two all the time
    EXPECT_THAT(actions, Contains(moves(gradients[i], device, i % 2 == 0 ? host : nvme))) << i;
    EXPECT_THAT(actions, Not(Contains(moves(gradients[i], device, i % 2 == 0 ? nvme : host)))) << i;
  }
}

TEST(Eviction, what_the_update_needs_last_passes_the_host_on_its_way_to_nvme) {
  LongBackward world;
  const auto actions = world.take_actions();
  for (const ChunkId gradient : world.first) {
    EXPECT_THAT(actions, Contains(moves(gradient, device, host)));
    EXPECT_EQ(world.state(gradient, host), CopyState::valid);
    EXPECT_EQ(world.state(gradient, nvme), CopyState::reserved);
  }
  for (const ChunkId gradient : world.last) {
    EXPECT_THAT(actions, Contains(moves(gradient, device, host)));
    EXPECT_THAT(actions, Not(Contains(moves(gradient, device, nvme))));
    EXPECT_THAT(actions, Not(Contains(moves(gradient, nvme, host)))) << "it is brought back too early";
    EXPECT_EQ(world.state(gradient, host), CopyState::absent);
    EXPECT_EQ(world.state(gradient, nvme), CopyState::valid);
  }
}

TEST(Eviction, what_the_host_has_no_room_for_waits_on_the_device_until_it_has_rather_than_go_to_nvme) {
  LongBackward world;
  for (const ChunkId gradient : world.waiting) {
    EXPECT_EQ(world.state(gradient, device), CopyState::valid);
    EXPECT_EQ(world.state(gradient, host), CopyState::absent);
    EXPECT_EQ(world.state(gradient, nvme), CopyState::reserved);
  }
  world.take_actions();
  world.announce(world.gradients);
  world.step_mark();
  world.run();
  EXPECT_THAT(world.take_actions(), Not(Contains(moves(world.waiting.front(), device, host)))) << "there is no room";
  for (const ChunkId gradient : world.first) {
    world.use(gradient, host, reading);
    world.discard(gradient);
    world.run();
  }
  for (const ChunkId gradient : world.waiting) {
    EXPECT_EQ(world.state(gradient, host), CopyState::valid) << "the first have made room";
    EXPECT_EQ(world.state(gradient, nvme), CopyState::reserved);
  }
}

TEST(Eviction, what_waits_on_the_device_leaves_it_where_its_room_is_wanted_at_once) {
  LongBackward world;
  Call& call = world.allocate(4 * MiB);
  world.run();
  ASSERT_TRUE(call.granted()) << call.error_text();
  for (const ChunkId gradient : world.waiting) {
    EXPECT_EQ(world.state(gradient, device), CopyState::absent);
    EXPECT_TRUE(world.policy().chunk(gradient).has_bytes());
  }
}

/// A pass reads parameters and makes gradients, which rest on NVMe, in the opposite order. For two of five the host has
/// room, and for two more the device.
struct ForwardAndBackward : World {
  ForwardAndBackward() : World(4, 6, 16, 4) {
    for (const ChunkId gradient : gradients) discard(gradient);
    announce(gradients);
    const auto written = written_in_reverse(gradients);
    accesses.insert(accesses.end(), written.begin(), written.end());
  }
  void train() {
    learn(accesses);
    run();
    pass(accesses);
  }
  bool waits(ChunkId gradient) const {
    return state(gradient, device) == CopyState::valid && state(gradient, nvme) == CopyState::reserved &&
           state(gradient, host) == CopyState::absent;
  }
  const std::vector<ChunkId> parameters = chunks(4, host);
  const std::vector<ChunkId> gradients = chunks(5, nvme);
  std::vector<ChunkAccess> accesses = reads(parameters);
};

TEST(Eviction, what_waits_on_the_device_keeps_its_room_from_what_comes_ahead_of_need) {
  ForwardAndBackward world;
  world.train();
  world.announce(world.gradients);
  world.step_mark();
  world.run();
  EXPECT_EQ(world.state(world.parameters[0], device), CopyState::valid);
  EXPECT_EQ(world.state(world.parameters[1], device), CopyState::valid);
  EXPECT_TRUE(world.waits(world.gradients[2]));
  EXPECT_TRUE(world.waits(world.gradients[3]));
  Call& call = world.acquire(reads(world.parameters));
  world.run();
  EXPECT_TRUE(call.granted()) << "it kept its room from what the program waits for: " << call.error_text();
}

TEST(Eviction, what_waits_on_the_device_does_so_no_longer_where_the_step_updates_others) {
  ForwardAndBackward world;
  world.train();
  world.run();
  EXPECT_TRUE(world.waits(world.gradients[2]));
  world.announce({});
  world.step_mark();
  world.run();
  for (const ChunkId parameter : world.parameters) EXPECT_EQ(world.state(parameter, device), CopyState::valid);
}

TEST(Eviction, nothing_waits_on_the_device_that_the_last_step_has_not_updated) {
  ForwardAndBackward world;
  world.announce({});
  world.train();
  world.run();
  for (const ChunkId gradient : world.gradients) EXPECT_FALSE(world.waits(gradient)) << gradient;
}

TEST(Eviction, nothing_waits_on_the_device_in_a_pass_that_ends_without_a_step) {
  ForwardAndBackward world;
  world.begin_pass(2, ScheduleBook::End::repetition);
  for (int i = 0; i < 3; ++i) world.pass(world.accesses);
  world.run();
  for (const ChunkId gradient : world.gradients) EXPECT_FALSE(world.waits(gradient)) << gradient;
}

TEST(Eviction, nothing_waits_on_the_device_whose_update_comes_late) {
  constexpr int layers = 16;
  World world(4, 14, 16, 4);  // with room on the host for one besides those that rest there
  std::vector<ChunkId> gradients;
  for (int i = 0; i < layers; ++i) gradients.push_back(world.chunk(i < 13 ? host : nvme, Kind::gradient));
  for (const ChunkId gradient : gradients) world.discard(gradient);
  world.announce(gradients);
  const std::vector<ChunkAccess> accesses = written_in_reverse(gradients);
  world.learn(accesses);
  world.run();
  for (const ChunkAccess& access : accesses) {
    world.pass({access});
    world.run();
    EXPECT_TRUE(world.policy().chunk(access.chunk).is_spare(device)) << access.chunk;
  }
}

TEST(Eviction, nothing_waits_on_the_device_that_the_host_has_room_for_though_a_norm_reads_it_before_the_update) {
  World world(4, 5, 16, 4);
  const auto gradients = world.chunks(4, nvme);  // less than there is room for, and twice as many are more
  for (const ChunkId gradient : gradients) world.discard(gradient);
  std::vector<ChunkId> twice = gradients;
  twice.insert(twice.end(), gradients.begin(), gradients.end());
  world.announce(twice);
  const std::vector<ChunkAccess> accesses = written_in_reverse(gradients);
  world.learn(accesses);
  world.run();
  world.pass(accesses);
  world.run();
  for (const ChunkId gradient : gradients) EXPECT_EQ(world.state(gradient, host), CopyState::valid) << gradient;
}

TEST(Eviction, no_more_waits_on_the_device_than_leaves_room_for_others_whatever_the_sizes) {
  World world(10, 4, 64, 4);
  std::vector<ChunkId> gradients;
  for (const std::uint64_t mib : {2, 2, 3, 4, 5, 1, 3, 2}) {
    gradients.push_back(world.add_chunk({.kind = Kind::gradient,
                                         .index = static_cast<std::uint32_t>(gradients.size()),
                                         .bytes = mib * MiB,
                                         .home = nvme,
                                         .room_bytes = {mib * MiB, mib * MiB, mib * MiB}}));
  }
  world.announce(gradients);
  const std::vector<ChunkAccess> accesses = written_in_reverse(gradients);
  world.learn(accesses);
  world.run();
  for (const ChunkId gradient : gradients) world.discard(gradient);
  world.run();
  world.pass(accesses);
  world.run();
  std::uint64_t waiting = 0;
  for (const ChunkId gradient : gradients) {
    const Residency& chunk = world.policy().chunk(gradient);
    waiting += chunk.at(device).readable() && !chunk.is_spare(device) ? chunk.info().bytes : 0;
  }
  EXPECT_EQ(waiting, 3 * MiB) << "after 2 and 2 for the host comes 3, and with 4 it would be more than half";
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

}  // namespace
}  // namespace terrace
