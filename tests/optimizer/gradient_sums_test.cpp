#include "optimizer/gradient_sums.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/update_queue.h"
#include "tests/optimizer/update_world.h"

namespace terrace {
namespace {

/// The host has room for a few gradients.
constexpr StreamSizes few_on_host{.granule_bytes = granule,
                                  .device_bytes = 1 << 20,
                                  .host_bytes = 16 * granule,
                                  .nvme_extents = 256,
                                  .prefetch_depth = 4};

std::vector<GradientRun> runs_of(const TestSet& set) {
  std::vector<GradientRun> runs;
  for (const auto& [from, to] : set.runs()) runs.push_back({from, to - from});
  return runs;
}

double sum_of(TestSet& set, const GradientRun& gradients) {
  const UpdateRun run = set.run(gradients.element_offset, gradients.element_offset + gradients.elements);
  return sum_of_squares(run.gradient_type, run.gradient, run.count, UpdateThreads(1));
}

/// A new gradient by the device, as backward makes one, and then on the host.
void make_gradient(UpdateWorld& world, TestSet& set, std::uint32_t seed) {
  set.fill_gradient(seed);
  const std::span<const std::byte> bytes = set.gradient_bytes();
  {
    const Pin pin = world.world.acquire(*set.chunks.gradient, Tier::device, Access::write);
    std::memcpy(pin.device(0), bytes.data(), bytes.size());
  }
  world.world.acquire(*set.chunks.gradient, Tier::host);
}

/// What is known within ten seconds.
template <class Sums>
std::optional<double> awaited(const Sums& sums, ChunkId gradient, const GradientRun& run) {
  const std::int64_t end_ns = monotonic_ns() + 10'000'000'000;
  std::optional<double> sum;
  while (!(sum = sums.of(gradient, run)) && monotonic_ns() < end_ns) std::this_thread::yield();
  return sum;
}

class GradientSumsTest : public testing::TestWithParam<Tier> {
 protected:
  GradientSumsTest() : world_(GetParam() == Tier::host ? roomy : few_on_host, GetParam()) { world_.add_sets(4); }

  void expect(TestSet& set) { sums_.expect(*set.chunks.gradient, set.chunks.gradient_type, runs_of(set)); }

  UpdateWorld world_;
  const UpdateThreads threads_{2};
  GradientSums sums_{world_.world.stream, threads_, {}};
};

INSTANTIATE_TEST_SUITE_P(At, GradientSumsTest, testing::Values(Tier::host, Tier::nvme),
                         [](const auto& test) { return "home_on_" + std::string(name_of(test.param)); });

TEST_P(GradientSumsTest, are_known_to_the_bit_once_a_gradient_has_come_to_the_host) {
  for (TestSet& set : world_.sets) {
    expect(set);
    make_gradient(world_, set, 17 + set.index);
    for (const GradientRun& run : runs_of(set)) {
      EXPECT_EQ(awaited(sums_, *set.chunks.gradient, run), sum_of(set, run)) << set.index;
    }
  }
}

TEST_P(GradientSumsTest, are_not_known_of_what_nobody_expects_and_of_other_runs) {
  TestSet& set = world_.sets.front();
  make_gradient(world_, set, 3);
  EXPECT_EQ(sums_.of(*set.chunks.gradient, runs_of(set).front()), std::nullopt);
  expect(set);
  EXPECT_EQ(sums_.of(*set.chunks.gradient, runs_of(set).front()), std::nullopt) << "it has not been written since";
  make_gradient(world_, set, 4);
  EXPECT_TRUE(awaited(sums_, *set.chunks.gradient, runs_of(set).front()));
  EXPECT_EQ(sums_.of(*set.chunks.gradient, {0, 999}), std::nullopt);
  EXPECT_EQ(sums_.of(*set.chunks.gradient, {1, 1000}), std::nullopt);
}

TEST_P(GradientSumsTest, are_forgotten_with_the_next_write) {
  TestSet& set = world_.sets.front();
  const GradientRun run = runs_of(set).front();
  expect(set);
  make_gradient(world_, set, 5);
  ASSERT_TRUE(awaited(sums_, *set.chunks.gradient, run));
  make_gradient(world_, set, 6);
  EXPECT_EQ(sums_.of(*set.chunks.gradient, run), std::nullopt);
  expect(set);
  make_gradient(world_, set, 7);
  EXPECT_EQ(awaited(sums_, *set.chunks.gradient, run), sum_of(set, run));
}

TEST_P(GradientSumsTest, of_other_runs_that_were_expected_before_are_not_taken_for_them) {
  TestSet& set = world_.sets.front();
  std::vector<GradientRun> runs = runs_of(set);
  for (std::uint32_t round = 0; round < 200; ++round) {
    sums_.expect(*set.chunks.gradient, set.chunks.gradient_type, runs);
    make_gradient(world_, set, round);
    std::reverse(runs.begin(), runs.end());
    sums_.expect(*set.chunks.gradient, set.chunks.gradient_type, runs);
    for (const GradientRun& run : runs) {
      EXPECT_EQ(sums_.of(*set.chunks.gradient, run).value_or(sum_of(set, run)), sum_of(set, run));
    }
    make_gradient(world_, set, 1000 + round);
    EXPECT_EQ(awaited(sums_, *set.chunks.gradient, runs.front()), sum_of(set, runs.front()));
  }
}

TEST_P(GradientSumsTest, of_a_gradient_that_comes_too_late_are_not_taken) {
  TestSet& set = world_.sets.front();
  expect(set);
  sums_.expect_no_more({{*set.chunks.gradient}});
  make_gradient(world_, set, 8);
  TestSet& next = world_.sets.back();
  expect(next);
  make_gradient(world_, next, 9);
  ASSERT_TRUE(awaited(sums_, *next.chunks.gradient, runs_of(next).front())) << "the thread is at what comes after it";
  EXPECT_EQ(sums_.of(*set.chunks.gradient, runs_of(set).front()), std::nullopt);
}

TEST(GradientSumsEnd, leaves_nothing_behind_of_gradients_that_are_expected_or_being_read) {
  UpdateWorld world(few_on_host, Tier::nvme);
  world.add_sets(4);
  const UpdateThreads threads(2);
  for (int round = 0; round < 20; ++round) {
    GradientSums sums(world.world.stream, threads, {});
    for (TestSet& set : world.sets) {
      sums.expect(*set.chunks.gradient, set.chunks.gradient_type, runs_of(set));
      if (set.index % 2 == 0) make_gradient(world, set, 10);
    }
  }
  world.world.stream.inspect([&](const Policy& policy) {
    for (const TestSet& set : world.sets) {
      EXPECT_FALSE(policy.chunk(*set.chunks.gradient).read_after_writes);
      EXPECT_FALSE(policy.chunk(*set.chunks.gradient).being_read);
    }
    policy.check_invariants();
  });
}

TEST_P(GradientSumsTest, are_those_of_the_newest_gradient_or_unknown_while_others_write) {
  TestSet& set = world_.sets.front();
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < world_.sets.size(); ++i) {
    others.emplace_back([&, i] {
      for (std::uint32_t round = 0; round < 50; ++round) {
        expect(world_.sets[i]);
        make_gradient(world_, world_.sets[i], round);
      }
    });
  }
  for (std::uint32_t round = 0; round < 200; ++round) {
    expect(set);
    make_gradient(world_, set, round);
    for (const GradientRun& run : runs_of(set)) {
      const std::optional<double> sum = sums_.of(*set.chunks.gradient, run);
      EXPECT_EQ(sum.value_or(sum_of(set, run)), sum_of(set, run));
    }
  }
  for (std::thread& other : others) other.join();
}

TEST(ExpectedJob, finds_its_norm_without_bringing_gradients_from_nvme_again) {
  UpdateWorld world(few_on_host, Tier::nvme);
  for (int i = 0; i < 12; ++i) world.add_set(0);
  UpdateQueue queue(world.world.stream, false, 2);
  for (TestSet& set : world.sets) {
    queue.expect_job_with(*set.chunks.gradient, set.chunks.gradient_type, runs_of(set));
    make_gradient(world, set, 20 + set.index);
    const std::int64_t end_ns = monotonic_ns() + 10'000'000'000;
    const auto is_awaited = [&] {
      return world.world.stream.inspect([&](const Policy& policy) {
        const Residency& gradient = policy.chunk(*set.chunks.gradient);
        return gradient.read_after_writes || gradient.being_read;
      });
    };
    while (is_awaited() && monotonic_ns() < end_ns) std::this_thread::yield();
    ASSERT_FALSE(is_awaited());
  }
  EXPECT_NE(world.world.state(*world.sets.front().chunks.gradient, Tier::host), CopyState::valid)
      << "there is no room for all";
  const std::uint64_t before = world.world.stream.usage().moved(Link::nvme_to_host);
  const UpdateTicket ticket = queue.submit(world.job(1, clipping, world.all()));
  const std::optional<double> norm = queue.norm(ticket);
  EXPECT_EQ(world.world.stream.usage().moved(Link::nvme_to_host), before);
  EXPECT_EQ(norm, world.update_arrays(1, clipping, world.all()));
  queue.finish();
  EXPECT_EQ(world.current(), world.all());
}

}  // namespace
}  // namespace terrace
