#include "optimizer/update_threads.h"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(UpdateThreads, does_every_part_once_whatever_their_number) {
  for (const int count : {1, 2, 3, 8}) {
    const UpdateThreads threads(count);
    EXPECT_LE(threads.count(), count);
    for (const std::size_t parts : {0, 1, 2, 7, 1000}) {
      std::vector<int> times(parts);  // not atomic: a part belongs to one thread
      threads.for_each(parts, [&](std::size_t i) { ++times[i]; });
      EXPECT_EQ(times, std::vector<int>(parts, 1)) << count << " threads";
    }
  }
}

TEST(UpdateThreads, has_at_least_one) { EXPECT_EQ(UpdateThreads(0).count(), 1); }

TEST(UpdateThreads, shows_parts_what_was_written_before_them_and_the_caller_what_they_wrote) {
  const UpdateThreads threads(4);
  std::vector<std::size_t> values(4096);
  for (std::size_t round = 0; round < 100; ++round) {
    for (std::size_t& value : values) value = round;
    threads.for_each(values.size(), [&](std::size_t i) { values[i] += i; });
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], round + i);
  }
}

TEST(UpdateThreads, serves_several_callers_at_a_time) {
  const UpdateThreads threads(2);
  std::vector<std::jthread> callers;
  std::atomic<std::size_t> done = 0;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) threads.for_each(16, [&](std::size_t) { ++done; });
    });
  }
  callers.clear();
  EXPECT_EQ(done, 4u * 50 * 16);
}

}  // namespace
}  // namespace terrace
