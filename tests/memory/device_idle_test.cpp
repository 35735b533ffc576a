// A wait of the program is a stall only as far as the device has nothing to compute meanwhile.
#include "memory/device_idle.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "memory/access_stream.h"
#include "offload/emulated_computation.h"
#include "offload/emulated_device.h"
#include "tests/memory/cuda_behind.h"

namespace terrace {
namespace {

class DeviceIdleOnCuda : public CudaBehind {
 protected:
  DeviceIdleOnCuda() { fall_behind(); }
};

/// For a moment, as nobody notifies.
void wait_once(DeviceIdle& idle) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  idle.wait(changed, lock);
}

TEST_F(DeviceIdleOnCuda, begins_when_what_was_issued_has_been_computed) {
  DeviceIdle idle(*device_);
  const std::int64_t begin_ns = monotonic_ns();
  wait_once(idle);
  const std::int64_t busy_ns = monotonic_ns();
  EXPECT_EQ(idle.begin_within(begin_ns, busy_ns), busy_ns) << "it computes, and has not been idle";
  catch_up();
  wait_once(idle);
  const std::int64_t end_ns = monotonic_ns();
  EXPECT_GE(idle.begin_within(begin_ns, end_ns), busy_ns);
  EXPECT_LT(idle.begin_within(begin_ns, end_ns), end_ns);
  EXPECT_EQ(idle.begin_within(end_ns, end_ns + 5), end_ns) << "a later part of the same wait";
}

TEST_F(DeviceIdleOnCuda, is_all_of_a_wait_where_the_driver_fails_to_say) {
  driver_->fail_next("record", "CUDA_ERROR_UNKNOWN");
  const DeviceIdle idle(*device_);
  EXPECT_EQ(idle.begin_within(3, 7), 3);
}

TEST_F(DeviceIdleOnCuda, a_program_whose_device_computes_meanwhile_does_not_stall) {
  HostArena arena(granule, TransferService::staging_blocks + 8);
  Budget host(Tier::host, arena.capacity_bytes());
  Budget nvme(Tier::nvme, 0);
  AccessStream stream({&device_->budget(), &host, &nvme}, *device_, arena, nullptr, nullptr, {});
  const auto fetch = [&](std::uint32_t index) {
    const ChunkAccess access{stream.add_chunk(Kind::parameter, index, granule, Tier::host), Tier::device, Access::read};
    stream.acquire({&access, 1});
    stream.remove_chunk(access.chunk);
  };
  fetch(0);
  EXPECT_EQ(stream.usage().stall_seconds, 0);
  catch_up();
  // It is seen to be idle when it is looked at: a fetch may be faster than that.
  for (std::uint32_t index = 1; index < 10'000 && stream.usage().stall_seconds == 0; ++index) fetch(index);
  EXPECT_GT(stream.usage().stall_seconds, 0);
}

TEST(DeviceIdle, begins_where_computation_that_is_only_waited_for_will_end) {
  EmulatedDevice device(1 << 20);
  const std::int64_t before_ns = monotonic_ns();
  EmulatedComputation::of_this_process().queue(0.001);
  const std::int64_t ends_ns = EmulatedComputation::of_this_process().ends_ns();
  const DeviceIdle idle(device);
  EXPECT_EQ(idle.begin_within(before_ns, ends_ns + 1000), ends_ns);
  EXPECT_EQ(idle.begin_within(before_ns, ends_ns - 1), ends_ns - 1);
  EmulatedComputation::of_this_process().wait();
}

}  // namespace
}  // namespace terrace
