// Which blocks run again: the plan against every other, and the played pass against what is done by hand.

#include "memory/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::uint64_t MiB = 1 << 20;

/// Blocks that are alike: 10 ms forward, 20 ms back, 1 MiB read and 19 MiB saved.
PassProfile pass_of(std::size_t blocks, std::uint64_t room_bytes, double bytes_per_second) {
  PassProfile pass;
  pass.blocks.assign(blocks,
                     {.forward_seconds = 0.01, .backward_seconds = 0.02, .input_bytes = MiB, .saved_bytes = 19 * MiB});
  pass.room_bytes = room_bytes;
  pass.out_bytes_per_second = bytes_per_second;
  pass.in_bytes_per_second = bytes_per_second;
  return pass;
}

double shortest_of_all(const PassProfile& pass) {
  double shortest = play(pass, Recomputed(pass.blocks.size())).seconds;
  for (unsigned choice = 0; choice < 1U << pass.blocks.size(); ++choice) {
    Recomputed recomputed(pass.blocks.size());
    for (std::size_t i = 0; i < recomputed.size(); ++i) {
      recomputed[i] = ((choice >> i) & 1U) != 0 && pass.blocks[i].may_run_again;
    }
    shortest = std::min(shortest, play(pass, recomputed).seconds);
  }
  return shortest;
}

std::ptrdiff_t count(const Recomputed& plan) { return std::count(plan.begin(), plan.end(), true); }

TEST(ActivationPlan, moves_nothing_where_there_is_room) {
  const PassProfile pass = pass_of(6, 120 * MiB, 1e6);
  const Recomputed plan = plan_recompute(pass);
  EXPECT_EQ(count(plan), 0);
  const PlayedPass played = play(pass, plan);
  EXPECT_NEAR(played.forward_seconds, 0.06, 1e-9);
  EXPECT_NEAR(played.seconds, 0.18, 1e-9);
  EXPECT_EQ(played.all_leaving_bytes(), 0);
}

TEST(ActivationPlan, has_the_first_blocks_leave_where_a_fast_link_brings_them_back_in_time) {
  const PassProfile pass = pass_of(6, 80 * MiB, 20e9);
  const Recomputed plan = plan_recompute(pass);
  EXPECT_EQ(count(plan), 0);
  const PlayedPass played = play(pass, plan);
  EXPECT_EQ(played.leaving_bytes, (std::vector<std::uint64_t>{20 * MiB, 20 * MiB, 0, 0, 0, 0}));
  EXPECT_NEAR(played.seconds, 0.18, 0.002);
}

TEST(ActivationPlan, waits_for_a_slow_link_as_long_as_it_takes) {
  // Two of three blocks leave, 20 MiB each in 1 s. The third begins when the first has left, and nothing is hidden.
  PassProfile pass = pass_of(3, 40 * MiB, 20.0 * MiB);
  const PlayedPass played = play(pass, Recomputed(3));
  EXPECT_EQ(played.all_leaving_bytes(), 20 * MiB);
  EXPECT_NEAR(played.forward_seconds, 0.01 + 1 + 0.01, 1e-6);
  // Its room is free once the third's backward has ended.
  EXPECT_NEAR(played.seconds, 1.02 + 0.02 + 1 + 0.02, 1e-6);
}

TEST(ActivationPlan, runs_all_again_where_the_link_is_hopeless_and_what_blocks_read_has_room) {
  const PassProfile pass = pass_of(6, 30 * MiB, 1e6);
  const PlayedPass played = play(pass, plan_recompute(pass));
  EXPECT_EQ(played.all_leaving_bytes(), 0);
  EXPECT_LT(played.seconds, 0.18 + 0.06 + 1e-9);
}

TEST(ActivationPlan, runs_no_block_again_that_may_not) {
  PassProfile pass = pass_of(6, 30 * MiB, 1e6);
  pass.blocks[1].may_run_again = pass.blocks[4].may_run_again = false;
  const Recomputed plan = plan_recompute(pass);
  EXPECT_FALSE(plan[1]);
  EXPECT_FALSE(plan[4]);
  EXPECT_GT(count(plan), 0);
  EXPECT_NEAR(play(pass, plan).seconds, shortest_of_all(pass), 1e-9);
}

TEST(ActivationPlan, is_infinitely_long_where_a_block_does_not_fit) {
  const PassProfile pass = pass_of(3, 19 * MiB, 1e9);
  EXPECT_TRUE(std::isinf(play(pass, Recomputed(3)).seconds));
  EXPECT_TRUE(std::isinf(play(pass, Recomputed(3, true)).seconds));
}

TEST(ActivationPlan, of_no_blocks_is_empty) {
  EXPECT_TRUE(plan_recompute(PassProfile{}).empty());
  EXPECT_EQ(play(PassProfile{}, {}).seconds, 0);
}

TEST(ActivationPlan, is_the_shortest_of_all_or_within_six_percent_of_it) {
  std::mt19937 random(1);
  const auto between = [&](unsigned low, unsigned high) { return low + random() % (high - low + 1); };
  int above = 0;
  int mixed = 0;
  constexpr int cases = 1000;
  for (int i = 0; i < cases; ++i) {
    PassProfile pass;
    std::uint64_t all = 0;
    std::uint64_t largest = 0;
    for (int block = 0; block < 6; ++block) {
      const double seconds = static_cast<double>(between(1, 100)) * 1e-3;
      pass.blocks.push_back({.forward_seconds = seconds,
                             .backward_seconds = 2 * seconds,
                             .input_bytes = between(0, 3) * MiB,
                             .saved_bytes = between(1, 32) * MiB});
      const std::uint64_t bytes = pass.blocks.back().input_bytes + pass.blocks.back().saved_bytes;
      all += bytes;
      largest = std::max(largest, bytes);
    }
    pass.room_bytes = largest + (all - largest) * between(0, 99) / 150 + 20 * MiB;
    pass.out_bytes_per_second = static_cast<double>(between(1, 100)) * 1e7;
    pass.in_bytes_per_second = pass.out_bytes_per_second;
    const double shortest = shortest_of_all(pass);
    const Recomputed plan = plan_recompute(pass);
    const double found = play(pass, plan).seconds;
    ASSERT_LE(found, shortest * 1.06) << "case " << i;
    above += found > shortest * (1 + 1e-5) ? 1 : 0;
    mixed += count(plan) > 0 && count(plan) < 6 ? 1 : 0;
  }
  EXPECT_LE(above, cases / 50);
  EXPECT_GE(mixed, cases / 5) << "the others prove little";
}

TEST(ActivationPlan, finds_the_rates_with_which_a_pass_was_as_slow_as_it_was) {
  PassProfile pass = pass_of(8, 60 * MiB, 0);
  pass.out_bytes_per_second = 6e8;
  pass.in_bytes_per_second = 3e8;
  const PlayedPass played = play(pass, Recomputed(8));
  PassProfile found = pass;
  set_rates_as_seen(found, played.forward_seconds, played.seconds - played.forward_seconds);
  EXPECT_NEAR(found.out_bytes_per_second, 6e8, 6e6);
  EXPECT_NEAR(found.in_bytes_per_second, 3e8, 3e6);
}

TEST(ActivationPlan, takes_links_that_nothing_waited_for_as_unlimited) {
  PassProfile pass = pass_of(8, 60 * MiB, 0);
  set_rates_as_seen(pass, 0.08, 0.16);
  EXPECT_TRUE(std::isinf(pass.out_bytes_per_second));
  EXPECT_TRUE(std::isinf(pass.in_bytes_per_second));
  EXPECT_EQ(count(plan_recompute(pass)), 0);
}

}  // namespace
}  // namespace terrace
