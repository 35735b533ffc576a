/// What is CUDA's own of its device, on a driver in software; its slots are in cuda_slots_test.cpp, and what every
/// device promises in device_contract_test.cpp.

#include "offload/cuda_device.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fallback.h"
#include "tests/offload/cuda_device_fixture.h"

namespace terrace {
namespace {

TEST(CudaCapacity, is_what_is_free_less_a_margin) {
  constexpr std::uint64_t GiB = std::uint64_t{1} << 30;
  EXPECT_EQ(automatic_capacity({.free_bytes = 7 * GiB, .total_bytes = 8 * GiB}), 7 * GiB - GiB / 2);
  EXPECT_EQ(automatic_capacity({.free_bytes = 79 * GiB, .total_bytes = 80 * GiB}), 79 * GiB - 80 * GiB / 32);
  EXPECT_EQ(automatic_capacity({.free_bytes = GiB / 4, .total_bytes = 8 * GiB}), 0u);
}

// ---- Streams and fences

TEST_F(CudaDeviceTest, computation_ends_when_all_streams_that_were_named_have_done_what_was_issued) {
  const CudaStream first = compute_stream();
  const CudaStream second = compute_stream();
  device_->computes_on(nullptr);
  device_->computes_on(second);  // known
  std::byte* const memory = slot(1);
  std::atomic<int> ended{0};
  for (const CudaStream stream : {first, second, CudaStream{nullptr}}) launch(stream, memory, [&] { ++ended; });
  const Fence computed = device_->computation();
  EXPECT_FALSE(device_->reached(computed));
  open_gate();
  device_->wait(computed);
  EXPECT_EQ(ended, 3);
  EXPECT_TRUE(device_->reached(computed));
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, copies_out_come_after_the_computation_they_are_told_to) {
  const CudaStream stream = compute_stream();
  std::byte* const memory = slot(1);
  write(memory, std::byte{1});
  launch(stream, memory, [=] { *memory = std::byte{2}; });
  std::byte seen{};
  const Fence copied = device_->copy_out(&seen, memory, 1, device_->computation());
  EXPECT_FALSE(device_->reached(copied));
  open_gate();
  device_->wait(copied);
  EXPECT_EQ(seen, std::byte{2});
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, events_are_used_again) {
  compute_stream();
  std::byte* const memory = slot(1);
  for (int i = 0; i < 500; ++i) write(memory, std::byte{1}, device_->computation());
  EXPECT_LT(software_->calls("create_event"), 20u);
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, many_threads_issue_and_wait) {
  const CudaStream stream = compute_stream();
  open_gate();
  const auto work = [&](int number) {
    std::byte* const mine = slot(1);
    for (int i = 0; i < 100; ++i) {
      const auto value = static_cast<std::byte>(number * 100 + i);
      write(mine, value);
      launch(stream, mine, [=] { *mine ^= std::byte{1}; });
      std::byte seen{};
      device_->wait(device_->copy_out(&seen, mine, 1, device_->computation()));
      EXPECT_EQ(seen, value ^ std::byte{1});
    }
    free_slot(mine, 1);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

// ---- Host memory

TEST_F(CudaDeviceTest, pins_host_memory_until_it_is_unpinned) {
  std::vector<std::byte> host(granule);
  device_->pin(host);
  EXPECT_EQ(software_->registered_ranges(), 1u);
  device_->unpin(host);
  EXPECT_EQ(software_->registered_ranges(), 0u);
  device_->pin({});
  EXPECT_EQ(software_->calls("register_host"), 1u);
}

TEST_F(CudaDeviceTest, notes_host_memory_that_cannot_be_pinned_and_copies_all_the_same) {
  std::vector<std::byte> host(granule, std::byte{7});
  software_->fail_next("register_host", "CUDA_ERROR_NOT_PERMITTED");
  device_->pin(host);
  const std::vector<Fallback> noted = noted_fallbacks();
  EXPECT_TRUE(std::any_of(noted.begin(), noted.end(), [](const Fallback& each) {
    return each.what == "device: copies are slower, from and to host memory that is not pinned" &&
           each.reason == "device: register_host failed: injected (CUDA_ERROR_NOT_PERMITTED)";
  }));
  std::byte* const memory = slot(1);
  device_->wait(device_->copy_in(memory, host.data(), host.size(), {}));
  EXPECT_EQ(first_of(memory), std::byte{7});
  device_->unpin(host);
  free_slot(memory, 1);
}

// ---- Errors

TEST_F(CudaDeviceTest, copies_that_cannot_be_issued_throw) {
  std::byte* const memory = slot(1);
  std::byte host{};
  software_->fail_next("copy_in", "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_THROW(device_->copy_in(memory, &host, 1, {}), IoError);
  software_->fail_next("copy_out", "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_THROW(device_->copy_out(&host, memory, 1, {}), IoError);
  software_->fail_next("fill", "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_THROW(device_->fill_zero(memory, 1, {}), IoError);
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, a_copy_without_a_fence_is_over_when_it_throws) {
  std::byte* const memory = slot(1);
  std::vector<std::byte> host(granule, std::byte{3});
  software_->fail_next("record", "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_THROW(device_->copy_in(memory, host.data(), host.size(), {}), OutOfMemory);
  std::memset(host.data(), 0, host.size());
  EXPECT_EQ(first_of(memory), std::byte{3});
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, a_copy_that_failed_on_its_way_is_no_longer_awaited_and_says_why) {
  std::byte* const memory = slot(1);
  std::byte host{};
  const Fence copied = device_->copy_in(memory, &host, 1, {});
  software_->fail_next("reached", "CUDA_ERROR_ECC_UNCORRECTABLE");
  software_->fail_next("synchronize_event", "CUDA_ERROR_ECC_UNCORRECTABLE");
  EXPECT_TRUE(device_->reached(copied));
  try {
    device_->wait(copied);
    ADD_FAILURE() << "it said nothing";
  } catch (const IoError& error) {
    EXPECT_EQ(error.message(), "device: synchronize_event failed: injected (CUDA_ERROR_ECC_UNCORRECTABLE)");
  }
  device_->wait(copied);  // the host may not touch its end before
  free_slot(memory, 1);
}

TEST_F(CudaDeviceTest, an_error_that_could_not_be_thrown_is_thrown_by_what_comes_next) {
  compute_stream();
  std::byte* const memory = slot(1);
  software_->fail_next("record", "CUDA_ERROR_LAUNCH_FAILED");
  testing::internal::CaptureStderr();
  device_->unmap_slot(memory, granule);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos);
  EXPECT_THROW(device_->map_slot(granule), IoError);
  EXPECT_THROW(device_->allocate(granule), IoError);
  std::byte host{};
  EXPECT_THROW(device_->copy_in(memory, &host, 1, {}), IoError);
  device_->unmap_slot(memory, granule);
}

}  // namespace
}  // namespace terrace
