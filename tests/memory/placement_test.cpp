#include "memory/placement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

using Rooms = std::vector<std::array<std::uint64_t, tier_count>>;

constexpr std::optional<Config::Shares> by_default;

Rooms equal(std::size_t count, std::uint64_t bytes) { return Rooms(count, {bytes, bytes, bytes}); }

TEST(Placement, by_default_chunks_go_to_host_then_nvme_then_device) {
  RestingRoom room{10, 20, 30};  // device, host, nvme
  const std::vector<Tier> homes = choose_homes(equal(6, 10), by_default, room);
  EXPECT_EQ(homes, (std::vector{Tier::host, Tier::host, Tier::nvme, Tier::nvme, Tier::nvme, Tier::device}));
  EXPECT_EQ(room, (RestingRoom{0, 0, 0}));
}

TEST(Placement, by_default_a_smaller_chunk_still_uses_the_room_that_a_larger_one_could_not) {
  RestingRoom room{0, 10, 100};
  const std::vector<Tier> homes = choose_homes(Rooms{{8, 8, 8}, {4, 4, 4}, {2, 2, 2}}, by_default, room);
  EXPECT_EQ(homes, (std::vector{Tier::host, Tier::nvme, Tier::host}));
  EXPECT_EQ(room, (RestingRoom{0, 0, 96}));
}

TEST(Placement, a_chunk_is_measured_by_what_it_takes_on_each_tier) {
  RestingRoom room{100, 9, 10};
  const std::vector<Tier> homes = choose_homes(Rooms{{4, 10, 10}, {4, 10, 12}}, by_default, room);
  EXPECT_EQ(homes, (std::vector{Tier::nvme, Tier::device}));
  EXPECT_EQ(room, (RestingRoom{96, 9, 0}));
}

TEST(Placement, what_fits_nowhere_is_sent_to_the_host_where_taking_it_fails) {
  RestingRoom room{1, 2, 3};
  EXPECT_EQ(choose_homes(equal(1, 10), by_default, room), std::vector{Tier::host});
  EXPECT_EQ(room[index_of(Tier::host)], 0u);
}

TEST(Placement, room_is_shared_by_the_calls_that_follow_each_other) {
  RestingRoom room{0, 15, 100};
  EXPECT_EQ(choose_homes(equal(1, 10), by_default, room), std::vector{Tier::host});
  EXPECT_EQ(choose_homes(equal(1, 10), by_default, room), std::vector{Tier::nvme});
}

TEST(Placement, shares_are_followed_to_within_one_chunk_all_along) {
  const std::vector<Config::Shares> cases{{1, 0, 0},     {0, 1, 0},       {0, 0, 1},       {0.25, 0.75, 0},
                                          {0, 0.5, 0.5}, {0.1, 0.2, 0.7}, {0.4, 0.3, 0.3}, {0.34, 0.33, 0.33}};
  for (const Config::Shares& shares : cases) {
    std::mt19937_64 random(1);
    Rooms rooms(300);
    std::uint64_t largest = 0;
    for (auto& bytes : rooms) {
      bytes.fill(1 + random() % 1000);
      largest = std::max(largest, bytes[0]);
    }
    RestingRoom room{1'000'000, 1'000'000, 1'000'000};
    const std::vector<Tier> homes = choose_homes(rooms, shares, room);
    const std::array<double, tier_count> share{shares.device, shares.host, shares.nvme};
    std::array<double, tier_count> placed{};
    double total = 0;
    for (std::size_t i = 0; i < rooms.size(); ++i) {
      placed[index_of(homes[i])] += static_cast<double>(rooms[i][0]);
      total += static_cast<double>(rooms[i][0]);
      for (const Tier tier : all_tiers) {
        EXPECT_NEAR(placed[index_of(tier)], share[index_of(tier)] * total, static_cast<double>(largest))
            << name_of(tier) << " after chunk " << i;
        EXPECT_TRUE(share[index_of(tier)] > 0 || placed[index_of(tier)] == 0) << name_of(tier);
      }
    }
  }
}

TEST(Placement, shares_are_followed_even_where_there_is_no_room) {
  RestingRoom room{0, 100, 100};
  EXPECT_EQ(choose_homes(equal(2, 10), Config::Shares{.device = 1, .host = 0, .nvme = 0}, room),
            (std::vector{Tier::device, Tier::device}));
  EXPECT_EQ(room, (RestingRoom{0, 100, 100}));
}

/// Seconds of a step whose drive has so many bytes of gradients, and states up to `lacking`.
double step_seconds(double gradients, double lacking, const StepRates& rates) {
  const double behind_forward =
      lacking / rates.read_bytes_per_second + (lacking - gradients) / rates.write_bytes_per_second;
  return std::max(rates.forward_seconds, behind_forward) +
         std::max(rates.backward_seconds, gradients / rates.write_bytes_per_second);
}

TEST(Placement, gradients_take_as_much_of_nvme_as_makes_the_step_shortest) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> factor(0.1, 10);
  int parts = 0;
  for (int i = 0; i < 2000; ++i) {
    const StepRates rates{.forward_seconds = factor(random),
                          .backward_seconds = factor(random),
                          .read_bytes_per_second = 1000 * factor(random),
                          .write_bytes_per_second = 1000 * factor(random)};
    const auto lacking = static_cast<std::uint64_t>(5000 * factor(random));
    const std::uint64_t chosen = gradient_bytes_for_nvme(lacking, rates);
    ASSERT_LE(chosen, lacking);
    parts += chosen > 0 && chosen < lacking ? 1 : 0;
    const auto all = static_cast<double>(lacking);
    const double seconds = step_seconds(static_cast<double>(chosen), all, rates);
    for (int part = 0; part <= 64; ++part) {
      ASSERT_LE(seconds, step_seconds(all * part / 64, all, rates) * (1 + 1e-3)) << "case " << i << ", part " << part;
    }
  }
  EXPECT_GT(parts, 20);
}

TEST(Placement, gradients_take_all_of_nvme_where_rates_or_times_are_not_known) {
  const StepRates known{
      .forward_seconds = 9, .backward_seconds = 1, .read_bytes_per_second = 100, .write_bytes_per_second = 10};
  EXPECT_EQ(gradient_bytes_for_nvme(50, known), 10u);
  for (double StepRates::*const each : {&StepRates::forward_seconds, &StepRates::backward_seconds,
                                        &StepRates::read_bytes_per_second, &StepRates::write_bytes_per_second}) {
    StepRates rates = known;
    rates.*each = 0;
    EXPECT_EQ(gradient_bytes_for_nvme(50, rates), 50u);
  }
}

}  // namespace
}  // namespace terrace
