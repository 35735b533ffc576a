#include "offload/time_slice.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <future>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

/// As the kernel has it. (Its header and the C library's do not go together.)
struct Attributes {
  std::uint32_t size, policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t slice_ns;
  std::array<std::uint64_t, 2> of_other_policies;
};

Attributes of_this_thread() {
  Attributes result{};
  EXPECT_EQ(::syscall(SYS_sched_getattr, 0, &result, sizeof result, 0), 0) << errno;
  return result;
}

template <class Work>
void in_a_thread(Work work) {
  std::thread(work).join();
}

TEST(TimeSlice, becomes_shorter_and_nothing_else_of_the_thread_changes) {
  in_a_thread([] {
    ASSERT_EQ(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 3), 0);
    const Attributes before = of_this_thread();
    if (before.slice_ns == 0) GTEST_SKIP() << "this system has no slices a thread";
    prefer_short_time_slices();
    const Attributes after = of_this_thread();
    EXPECT_LT(after.slice_ns, before.slice_ns);
    EXPECT_EQ(after.nice, 3);
    EXPECT_EQ(after.policy, before.policy);
    EXPECT_EQ(after.flags, before.flags);
  });
}

TEST(TimeSlice, a_policy_that_somebody_chose_is_left_alone) {
  in_a_thread([] {
    const sched_param idle{};
    ASSERT_EQ(::pthread_setschedparam(::pthread_self(), SCHED_IDLE, &idle), 0);
    const Attributes before = of_this_thread();
    prefer_short_time_slices();
    EXPECT_EQ(of_this_thread().slice_ns, before.slice_ns);
  });
}

class TimeSliceOfLinks : public TransferServiceTest {};

INSTANTIATE_TEST_SUITE_P(On, TimeSliceOfLinks, testing::Values("threads", "io_uring", "cuda"), named_by_engine);

TEST_P(TimeSliceOfLinks, the_thread_that_ends_a_transfer_has_short_ones) {
  const std::uint64_t usual = of_this_thread().slice_ns;
  if (usual == 0) GTEST_SKIP() << "this system has no slices a thread";
  for (const auto& [from, to] : routes) {
    Object& each = object(many_bytes);
    put(each, from, 3);
    std::promise<std::uint64_t> slice;
    TransferRequest moving = request(each, from, to);
    moving.done = [&](std::exception_ptr) { slice.set_value(of_this_thread().slice_ns); };
    start(std::move(moving)).wait();
    EXPECT_LT(slice.get_future().get(), usual) << name_of(from) << " to " << name_of(to);
  }
}

}  // namespace
}  // namespace terrace
