#include "offload/emulated_link.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"

namespace terrace {
namespace {

constexpr std::int64_t second_ns = 1'000'000'000;
/// So slow that whatever the test is held up by is nothing to it: a byte a second.
constexpr std::uint64_t crawling = 1;

TEST(EmulatedLink, without_a_rate_or_latency_bytes_are_there_at_once) {
  EmulatedLink link({});
  EXPECT_EQ(link.carry(1), 0);
  EXPECT_EQ(link.carry(std::uint64_t{1} << 40), 0);
}

TEST(EmulatedLink, without_a_rate_bytes_take_the_latency_whatever_their_number) {
  EmulatedLink link({.bytes_per_second = 0, .latency_ns = 5 * second_ns});
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{1} << 40}) {
    const std::int64_t before_ns = monotonic_ns();
    const std::int64_t there_ns = link.carry(bytes);
    EXPECT_GE(there_ns, before_ns + 5 * second_ns);
    EXPECT_LE(there_ns, monotonic_ns() + 5 * second_ns);
  }
}

TEST(EmulatedLink, bytes_take_what_the_rate_says_and_then_the_latency) {
  EmulatedLink link({.bytes_per_second = 1000, .latency_ns = 7 * second_ns});
  const std::int64_t before_ns = monotonic_ns();
  const std::int64_t there_ns = link.carry(3000);
  EXPECT_GE(there_ns, before_ns + 10 * second_ns);
  EXPECT_LE(there_ns, monotonic_ns() + 10 * second_ns);
}

TEST(EmulatedLink, nothing_is_carried_before_its_time) {
  const std::int64_t later_ns = monotonic_ns() + 1000 * second_ns;
  EXPECT_EQ(EmulatedLink({}).carry(7, later_ns), later_ns);
  EXPECT_EQ(EmulatedLink({.bytes_per_second = 0, .latency_ns = 5}).carry(7, later_ns), later_ns + 5);
  EmulatedLink link({.bytes_per_second = crawling, .latency_ns = 5});
  EXPECT_EQ(link.carry(7, later_ns), later_ns + 7 * second_ns + 5);
  EXPECT_EQ(link.carry(2), later_ns + 9 * second_ns + 5) << "behind what was put on it before";
}

TEST(EmulatedLink, what_comes_back_to_back_queues_up) {
  EmulatedLink link({.bytes_per_second = crawling});
  const std::int64_t first_ns = link.carry(1000);
  const std::int64_t second = link.carry(500);
  const std::int64_t third = link.carry(2000);
  EXPECT_EQ(second - first_ns, 500 * second_ns);
  EXPECT_EQ(third - second, 2000 * second_ns);
}

TEST(EmulatedLink, the_latency_of_one_piece_holds_up_nothing_behind_it) {
  EmulatedLink link({.bytes_per_second = crawling, .latency_ns = 10'000 * second_ns});
  const std::int64_t first_ns = link.carry(1000);
  EXPECT_EQ(link.carry(500) - first_ns, 500 * second_ns);
}

TEST(EmulatedLink, after_a_rest_bytes_start_when_they_come) {
  EmulatedLink link({.bytes_per_second = 1'000'000'000});
  const std::int64_t first_ns = link.carry(1);
  while (monotonic_ns() <= first_ns) {
  }
  const std::int64_t before_ns = monotonic_ns();
  EXPECT_GE(link.carry(1000), before_ns + 1000);
}

TEST(EmulatedLink, threads_share_one_queue) {
  EmulatedLink link({.bytes_per_second = crawling});
  std::array<std::vector<std::int64_t>, 3> there_ns;
  std::vector<std::thread> threads;
  for (std::vector<std::int64_t>& mine : there_ns) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) mine.push_back(link.carry(1000));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::int64_t> all;
  for (const std::vector<std::int64_t>& mine : there_ns) all.insert(all.end(), mine.begin(), mine.end());
  std::sort(all.begin(), all.end());
  for (std::size_t i = 1; i < all.size(); ++i) ASSERT_EQ(all[i] - all[i - 1], 1000 * second_ns);
}

}  // namespace
}  // namespace terrace
