#include "offload/time_slice.h"

#include <algorithm>
#include <array>
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
  ::syscall(SYS_sched_getattr, 0, &result, sizeof result, 0);
  return result;
}

template <class Work>
void in_a_thread(Work work) {
  std::thread(work).join();
}

/// Whether this system has slices a thread, lets threads ask for shorter ones, and has usual ones that are longer.
bool has_slices() {
  bool result = false;
  in_a_thread([&] {
    Attributes wanted = of_this_thread();
    const std::uint64_t usual = wanted.slice_ns;
    wanted.slice_ns = 100'000;
    result = usual > wanted.slice_ns && ::syscall(SYS_sched_setattr, 0, &wanted, 0) == 0 &&
             of_this_thread().slice_ns == wanted.slice_ns;
  });
  return result;
}

class TimeSlice : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_slices()) GTEST_SKIP() << "this system has no slices a thread, or does not grant shorter ones";
  }
};

TEST_F(TimeSlice, becomes_shorter_and_nothing_else_of_the_thread_changes) {
  in_a_thread([] {
    const auto thread = static_cast<id_t>(::gettid());
    const int nice = std::min(::getpriority(PRIO_PROCESS, thread) + 1, 19);
    ASSERT_EQ(::setpriority(PRIO_PROCESS, thread, nice), 0);
    const Attributes before = of_this_thread();
    prefer_short_time_slices();
    const Attributes after = of_this_thread();
    EXPECT_LT(after.slice_ns, before.slice_ns);
    EXPECT_EQ(after.nice, nice);
    EXPECT_EQ(after.policy, before.policy);
    EXPECT_EQ(after.flags, before.flags);
  });
}

TEST_F(TimeSlice, stays_as_it_is_under_a_policy_that_somebody_chose) {
  in_a_thread([] {
    const sched_param none{};
    ASSERT_EQ(::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &none), 0);
    const Attributes before = of_this_thread();
    prefer_short_time_slices();
    EXPECT_EQ(of_this_thread().slice_ns, before.slice_ns);
  });
}

/// Of the thread that ends a transfer to NVMe.
std::uint64_t slice_of_drives_thread(std::size_t block_bytes) {
  const TemporaryFolder folder;
  EmulatedDevice device(64 << 20);
  HostArena arena(block_bytes, 16);
  NvmeStore store({folder.path()}, extent_file_bytes(block_bytes, 4), block_bytes);
  const std::unique_ptr<IoEngine> engine = make_engine("threads");
  TransferService service(device, arena, &store, engine.get());
  std::promise<std::uint64_t> slice;
  TransferRequest writing;
  writing.from = host;
  writing.to = nvme;
  writing.bytes = block_bytes;
  writing.prepare = [&] { return TransferPlaces{.host = arena.allocate(1), .nvme = store.reserve(1)}; };
  writing.done = [&](const std::exception_ptr& error) {
    EXPECT_FALSE(error);
    slice.set_value(of_this_thread().slice_ns);
  };
  service.start(std::move(writing));
  return slice.get_future().get();
}

TEST_F(TimeSlice, is_short_for_drives_whose_blocks_are_large_and_as_usual_for_small_ones) {
  const std::uint64_t usual = of_this_thread().slice_ns;
  EXPECT_LT(slice_of_drives_thread(std::size_t{1} << 20U), usual);
  EXPECT_EQ(slice_of_drives_thread(std::size_t{64} << 10U), usual);
}

}  // namespace
}  // namespace terrace
