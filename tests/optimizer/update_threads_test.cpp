#include "optimizer/update_threads.h"

#include <atomic>
#include <cfenv>
#include <mutex>
#include <set>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "tests/offload/threads_of_process.h"
#include "tests/optimizer/many_threads.h"

namespace terrace {
namespace {

TEST(UpdateThreads, does_every_part_once_whatever_their_number) {
  const ManyThreads many;
  for (const int count : {1, 2, 3, many_threads}) {
    const UpdateThreads threads(count);
    ASSERT_EQ(threads.count(), count);
    for (const std::size_t parts : {0, 1, 2, 7, 1000}) {
      for (int round = 0; round < 100; ++round) {  // most begin when others have ended
        std::vector<int> times(parts);             // not atomic: a part belongs to one thread
        threads.for_each(parts, [&](std::size_t i) { ++times[i]; });
        ASSERT_EQ(times, std::vector<int>(parts, 1)) << count << " threads";
      }
    }
  }
}

TEST(UpdateThreads, has_at_least_one) { EXPECT_EQ(UpdateThreads(0).count(), 1); }

TEST(UpdateThreads, are_no_more_than_there_are_cores_unless_the_program_says_so_and_then_all_take_parts) {
  const int cores = static_cast<int>(processors_of_this_thread().size());
  EXPECT_EQ(UpdateThreads(cores + 1).count(), cores);
  const ManyThreads many;
  EXPECT_EQ(UpdateThreads(many_threads + 1).count(), many_threads);
  for (const int count : {2, 3, many_threads}) {
    const UpdateThreads threads(count);
    Meeting meeting(count);
    threads.for_each(16, [&](std::size_t) { meeting.come(); });
    EXPECT_EQ(meeting.size(), count);
  }
}

TEST(UpdateThreads, shows_parts_what_was_written_before_them_and_the_caller_what_they_wrote) {
  const ManyThreads many;
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

TEST(UpdateThreads, run_on_the_updates_own_hardware_threads_for_as_long_as_they_take_parts_and_callers_where_they_do) {
  const Processors all = processors_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "this process may run on one hardware thread only";
  const Processors one{all.back()};
  const auto caller = std::this_thread::get_id();
  std::mutex mutex;
  std::set<int> helpers;
  for (int round = 0; round < 3; ++round) {
    Meeting meeting;
    UpdateThreads(2, one).for_each(2, [&](std::size_t) {
      meeting.come();
      const bool is_caller = std::this_thread::get_id() == caller;
      const std::lock_guard lock(mutex);
      EXPECT_EQ(processors_of_this_thread(), is_caller ? all : one);
      if (!is_caller) helpers.insert(::gettid());
    });
    EXPECT_EQ(meeting.size(), 2);
    EXPECT_EQ(processors_of_this_thread(), all);
    const auto threads = threads_of_process();
    for (const int helper : helpers) EXPECT_EQ(threads.at(helper), all) << "others use it next";
  }
}

// Alone in its process, as ctest runs it, it has oneTBB start them.
TEST(UpdateThreads, that_are_started_for_a_bound_caller_may_run_anywhere_afterwards) {
  const Processors all = processors_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "this process may run on one hardware thread only";
  const Processors one{all.back()};
  // oneTBB ends its threads some time after the last that called it: this one is there until it was looked.
  std::thread([&] {
    bind_this_thread(one);
    const int caller = ::gettid();
    std::mutex mutex;
    std::set<int> helpers;
    Meeting meeting;
    UpdateThreads(2, one).for_each(2, [&](std::size_t) {
      meeting.come();
      const std::lock_guard lock(mutex);
      if (::gettid() != caller) helpers.insert(::gettid());
    });
    ASSERT_EQ(helpers.size(), 1u);
    EXPECT_EQ(threads_of_process().at(*helpers.begin()), all);
  }).join();
}

TEST(UpdateThreads, never_bind_a_caller_that_takes_anothers_parts) {
  const Processors all = processors_of_this_thread();
  const UpdateThreads threads(2, {all.back()});
  std::vector<std::jthread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      static thread_local bool is_caller = false;
      is_caller = true;
      for (int round = 0; round < 200; ++round) {
        threads.for_each(16, [&](std::size_t) {
          if (is_caller) {
            EXPECT_EQ(processors_of_this_thread(), all);
          }
        });
      }
    });
  }
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
