#include "optimizer/update_threads.h"

#include <atomic>
#include <cfenv>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

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

TEST(UpdateThreads, computes_by_the_standard_whatever_the_program_told_its_own_thread) {
  std::fenv_t before{};
  std::fegetenv(&before);
  std::fesetround(FE_UPWARD);
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | _MM_FLUSH_ZERO_ON | 0x40u);  // and what is read is taken for zero
#endif
  volatile float small = 0x1p-140f;
  std::vector<float> products(1000);
  std::vector<int> modes(1000);
  const auto compute = [&](std::size_t i) {
    products[i] = small * 0.5f;
    modes[i] = std::fegetround();
  };
  UpdateThreads(4).for_each(1000, compute);
  const int after = std::fegetround();
  float alone = 0;
  UpdateThreads(1).for_each(1, [&](std::size_t) { alone = small * 0.5f; });
  std::fesetenv(&before);
  EXPECT_EQ(after, FE_UPWARD) << "is the program's again";
  EXPECT_EQ(modes, std::vector<int>(1000, FE_TONEAREST));
  EXPECT_EQ(products, std::vector<float>(1000, 0x1p-141f));
  EXPECT_EQ(alone, 0x1p-141f);
}

}  // namespace
}  // namespace terrace
