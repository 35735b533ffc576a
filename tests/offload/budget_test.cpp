#include "offload/budget.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"

namespace terrace {
namespace {

constexpr std::uint64_t MiB = 1024 * 1024;

std::uint64_t sum_of_kinds(const Budget& budget) {
  std::uint64_t sum = 0;
  for (const Kind kind : all_kinds) sum += budget.used(kind);
  return sum;
}

TEST(Budget, takes_what_fits_and_changes_nothing_where_it_does_not) {
  Budget budget(Tier::device, 100);
  EXPECT_TRUE(budget.try_reserve(Kind::parameter, 60));
  EXPECT_FALSE(budget.try_reserve(Kind::gradient, 41));
  EXPECT_EQ(budget.used(), 60u);
  EXPECT_EQ(budget.used(Kind::gradient), 0u);
  EXPECT_EQ(budget.peak(), 60u);
  EXPECT_TRUE(budget.try_reserve(Kind::gradient, 40));
  EXPECT_EQ(budget.free(), 0u);
  EXPECT_TRUE(budget.try_reserve(Kind::other, 0));
  EXPECT_FALSE(budget.try_reserve(Kind::other, 1));
}

TEST(Budget, a_size_near_the_largest_number_does_not_wrap_around) {
  Budget budget(Tier::host, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::parameter, 60));
  EXPECT_FALSE(budget.try_reserve(Kind::parameter, std::numeric_limits<std::uint64_t>::max()));
  EXPECT_FALSE(budget.try_reserve(Kind::parameter, std::numeric_limits<std::uint64_t>::max() - 59));
  EXPECT_EQ(budget.used(), 60u);
}

TEST(Budget, what_is_needed_is_the_most_that_could_not_leave_at_one_moment) {
  Budget budget(Tier::device, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::parameter, 60));
  EXPECT_EQ(budget.needed(), 0u) << "a chunk can leave";
  budget.hold(20);
  ASSERT_TRUE(budget.try_reserve(Kind::buffer, 15));
  EXPECT_EQ(budget.held(), 35u);
  EXPECT_EQ(budget.held_chunk_bytes(), 20u);
  budget.let_go(20);
  EXPECT_EQ(budget.held_chunk_bytes(), 0u);
  budget.release(Kind::buffer, 10);
  EXPECT_EQ(budget.held(), 5u);
  ASSERT_TRUE(budget.try_reserve(Kind::other, 25));
  EXPECT_FALSE(budget.try_reserve(Kind::other, 25));
  EXPECT_EQ(budget.needed(), 35u) << "of two moments, not of both together, and not of what was refused";
  budget.need(50);
  budget.need(40);
  EXPECT_EQ(budget.needed(), 50u);
  EXPECT_EQ(budget.held(), 30u);
}

TEST(Budget, kinds_sum_to_what_is_used) {
  Budget budget(Tier::host, 1000);
  for (const Kind kind : all_kinds) {
    ASSERT_TRUE(budget.try_reserve(kind, 10 + index_of(kind)));
    EXPECT_EQ(budget.used(kind), 10 + index_of(kind));
  }
  EXPECT_EQ(sum_of_kinds(budget), budget.used());
  budget.release(Kind::activation, 5);
  EXPECT_EQ(sum_of_kinds(budget), budget.used());
}

TEST(Budget, what_is_counted_anew_is_used_as_before_but_of_another_kind) {
  Budget budget(Tier::device, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::other, 30));
  ASSERT_EQ(budget.take_program_peak(), 30u);
  budget.recount(Kind::other, Kind::activation, 20);
  EXPECT_EQ(budget.used(Kind::other), 10u);
  EXPECT_EQ(budget.used(Kind::activation), 20u);
  EXPECT_EQ(budget.used(), 30u);
  EXPECT_EQ(budget.peak(), 30u) << "at no moment was it counted twice";
  EXPECT_EQ(budget.held(), 10u) << "a chunk can leave";
  EXPECT_EQ(budget.take_program_peak(), 30u) << "of which it was until now";
  EXPECT_EQ(budget.take_program_peak(), 10u);
}

TEST(Budget, peaks_are_the_highest_use_of_the_tier_and_of_each_kind) {
  Budget budget(Tier::device, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::parameter, 50));
  budget.release(Kind::parameter, 30);
  ASSERT_TRUE(budget.try_reserve(Kind::gradient, 60));
  budget.release(Kind::gradient, 60);
  EXPECT_EQ(budget.peak(Kind::parameter), 50u);
  EXPECT_EQ(budget.peak(Kind::gradient), 60u);
  EXPECT_EQ(budget.peak(), 80u) << "the two peaks did not coincide";
}

TEST(Budget, a_step_peak_starts_anew_from_what_is_used) {
  Budget budget(Tier::device, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::activation, 70));
  budget.release(Kind::activation, 60);
  EXPECT_EQ(budget.take_step_peak(), 70u);
  EXPECT_EQ(budget.take_step_peak(), 10u);
  ASSERT_TRUE(budget.try_reserve(Kind::activation, 5));
  EXPECT_EQ(budget.take_step_peak(), 15u);
  EXPECT_EQ(budget.peak(), 70u);
}

TEST(Budget, concurrent_reservations_never_overshoot) {
  constexpr std::uint64_t capacity = 1000;
  Budget budget(Tier::device, capacity);
  std::atomic<std::uint64_t> held{0};  // counted after it was granted and before it is given back
  std::atomic<bool> overshot{false};
  const auto work = [&](std::uint64_t seed) {
    for (int i = 0; i < 50'000; ++i) {
      seed = seed * 6364136223846793005 + 1442695040888963407;
      const std::uint64_t bytes = (seed >> 33) % 700;
      const Kind kind = all_kinds[(seed >> 20) % kind_count];
      if (!budget.try_reserve(kind, bytes)) continue;
      if (held.fetch_add(bytes) + bytes > capacity || budget.used() > capacity) overshot = true;
      held.fetch_sub(bytes);
      budget.release(kind, bytes);
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 1; i <= 3; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(overshot);
  EXPECT_LE(budget.peak(), capacity);
  EXPECT_GT(budget.peak(), 0u);
  EXPECT_EQ(budget.used(), 0u);
  for (const Kind kind : all_kinds) EXPECT_EQ(budget.used(kind), 0u);
}

TEST(Budget, describes_who_holds_what) {
  Budget budget(Tier::device, 64 * MiB);
  ASSERT_TRUE(budget.try_reserve(Kind::other, 12 * MiB));
  ASSERT_TRUE(budget.try_reserve(Kind::parameter, 48 * MiB));
  EXPECT_EQ(budget.describe(), "device: 60MiB of 64MiB used: parameter 48MiB, other 12MiB");
}

TEST(Budget, describes_itself_when_nothing_is_used) {
  const Budget budget(Tier::nvme, 64 * MiB);
  EXPECT_NE(budget.describe().find("nvme: 0B of 64MiB used"), std::string::npos) << budget.describe();
}

TEST(Reservation, holds_its_bytes_for_as_long_as_it_lives) {
  Budget budget(Tier::host, 100);
  {
    const Reservation reservation(budget, Kind::other, 70);
    EXPECT_EQ(reservation.bytes(), 70u);
    EXPECT_EQ(budget.used(Kind::other), 70u);
  }
  EXPECT_EQ(budget.used(), 0u);
}

TEST(Reservation, moves_without_giving_back_or_taking_twice) {
  Budget budget(Tier::host, 100);
  Reservation first(budget, Kind::other, 40);
  Reservation second(std::move(first));
  EXPECT_EQ(budget.used(), 40u);
  Reservation third(budget, Kind::activation, 50);
  third = std::move(second);  // gives back its own
  EXPECT_EQ(budget.used(), 40u);
  EXPECT_EQ(budget.used(Kind::activation), 0u);
  third = Reservation();
  EXPECT_EQ(budget.used(), 0u);
}

TEST(Budget, the_sample_peak_is_that_since_the_last_sample) {
  Budget budget(Tier::device, 100);
  ASSERT_TRUE(budget.try_reserve(Kind::parameter, 40));
  ASSERT_TRUE(budget.try_reserve(Kind::other, 50));
  budget.release(Kind::other, 50);
  EXPECT_EQ(budget.take_sample_peak(), 90u);
  EXPECT_EQ(budget.take_sample_peak(), 40u);
  EXPECT_EQ(budget.take_step_peak(), 90u) << "it has its own";
}

TEST(Budget, what_each_kind_uses_is_never_seen_above_the_capacity) {
  Budget budget(Tier::device, 100);
  std::atomic<bool> done = false;
  const auto use = [&](Kind kind) {
    while (!done) {
      if (budget.try_reserve(kind, 70)) budget.release(kind, 70);
    }
  };
  std::thread first(use, Kind::parameter);
  std::thread second(use, Kind::other);
  for (int i = 0; i < 20'000; ++i) {
    if (const auto used = budget.used_by_kind()) {
      EXPECT_LE(std::accumulate(used->begin(), used->end(), std::uint64_t{0}), 100u);
    }
  }
  done = true;
  first.join();
  second.join();
  const auto used = budget.used_by_kind();
  ASSERT_TRUE(used.has_value());
  EXPECT_EQ(std::accumulate(used->begin(), used->end(), std::uint64_t{0}), 0u);
}

TEST(Reservation, a_refusal_says_who_holds_what_and_the_setting_that_is_enough) {
  Budget budget(Tier::host, 64 * MiB);
  ASSERT_TRUE(budget.try_reserve(Kind::momentum, 48 * MiB));
  try {
    const Reservation reservation(budget, Kind::other, 16 * MiB + 100);
    FAIL() << "16MiB and 100 bytes are too many";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(error.message().find("momentum 48MiB"), std::string::npos) << error.what();
    const std::string hint = error.hint();
    const std::string before = "raise host.memory to at least ";
    ASSERT_EQ(hint.substr(0, before.size()), before);
    EXPECT_EQ(parse_bytes(hint.substr(before.size())), 64 * MiB + 100) << "not rounded down";
  }
  EXPECT_EQ(budget.used(), 48 * MiB);
}

}  // namespace
}  // namespace terrace
