/// What is CUDA's own of its device, on a driver in software; what every device promises is in
/// device_contract_test.cpp.

#include "offload/cuda_device.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fallback.h"
#include "tests/offload/software_cuda.h"

namespace terrace {
namespace {

constexpr std::uint64_t granule = 64 << 10;
constexpr std::uint64_t capacity = 16 * granule;

class CudaDeviceTest : public testing::Test {
 protected:
  void TearDown() override {
    for (const CudaStream stream : compute_) software_->synchronize(stream);
    device_.reset();
    for (const CudaStream stream : compute_) software_->destroy_stream(stream);
  }

  /// A stream that the device knows of.
  CudaStream compute_stream() {
    compute_.push_back(software_->create_stream());
    device_->computes_on(compute_.back());
    return compute_.back();
  }
  /// A kernel that touches a slot, begins when the gate is opened and then does its work.
  void launch(
      CudaStream stream, std::byte* slot, std::function<void()> work = [] {}) {
    software_->launch(stream, {{slot, granule}}, [gate = gate_, work = std::move(work)] {
      gate.wait();
      work();
    });
  }
  void open_gate() { gate_opener_.set_value(); }

  std::byte* slot(std::uint64_t granules) {
    EXPECT_TRUE(device_->budget().try_reserve(Kind::parameter, granules * granule));
    return device_->map_slot(granules * granule);
  }
  void free_slot(std::byte* slot, std::uint64_t granules) {
    device_->unmap_slot(slot, granules * granule);
    device_->budget().release(Kind::parameter, granules * granule);
  }
  void write(std::byte* memory, std::byte value, Fence after = {}) {
    const std::vector<std::byte> source(granule, value);
    device_->wait(device_->copy_in(memory, source.data(), source.size(), after));
  }
  std::byte first_of(const std::byte* memory) {
    std::byte first{};
    device_->wait(device_->copy_out(&first, memory, 1, {}));
    return first;
  }

  std::shared_ptr<SoftwareCuda> software_ = std::make_shared<SoftwareCuda>(SoftwareCuda::Options{
      .memory_bytes = capacity, .granule_bytes = granule, .longest_delay = std::chrono::microseconds(50)});
  std::unique_ptr<CudaDevice> device_ = std::make_unique<CudaDevice>(software_, capacity);
  std::vector<CudaStream> compute_;
  std::promise<void> gate_opener_;
  std::shared_future<void> gate_ = gate_opener_.get_future().share();
};

// ---- Slots and computation

TEST_F(CudaDeviceTest, a_slot_that_kernels_use_is_not_taken_apart_before_they_have_ended) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(16);
  std::atomic<bool> ended{false};
  launch(stream, first, [&] { ended = true; });
  free_slot(first, 16);
  std::future<bool> had_ended = std::async(std::launch::async, [&] {
    std::byte* const second = slot(1);
    const bool before = ended;
    free_slot(second, 1);
    return before;
  });
  open_gate();
  EXPECT_TRUE(had_ended.get());
}

TEST_F(CudaDeviceTest, a_slot_that_kernels_use_serves_the_next_of_its_size_at_once_and_copies_wait_for_them) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  write(first, std::byte{1});
  std::byte seen{};
  launch(stream, first, [&] { seen = *first; });
  free_slot(first, 2);
  std::byte* const second = slot(2);
  EXPECT_EQ(second, first) << "with the kernel before its gate";
  const std::vector<std::byte> source(granule, std::byte{2});
  const Fence copied = device_->copy_in(second, source.data(), source.size(), {});
  EXPECT_FALSE(device_->reached(copied));
  open_gate();
  device_->wait(copied);
  EXPECT_EQ(seen, std::byte{1});
  EXPECT_EQ(first_of(second), std::byte{2});
  free_slot(second, 2);
}

TEST_F(CudaDeviceTest, a_fill_of_a_reused_slot_waits_for_kernels_that_use_it) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  write(first, std::byte{1});
  std::byte seen{};
  launch(stream, first, [&] { seen = *first; });
  free_slot(first, 2);
  std::byte* const second = slot(2);
  const Fence filled = device_->fill_zero(second, granule, {});
  EXPECT_FALSE(device_->reached(filled));
  open_gate();
  device_->wait(filled);
  EXPECT_EQ(seen, std::byte{1});
  EXPECT_EQ(first_of(second), std::byte{});
  free_slot(second, 2);
}

TEST_F(CudaDeviceTest, zeroing_nothing_of_a_reused_slot_ends_when_it_may_be_written) {
  std::byte* const first = slot(2);
  launch(compute_stream(), first);
  free_slot(first, 2);
  std::byte* const second = slot(2);
  const Fence may_be_written = device_->fill_zero(second, 0, {});
  EXPECT_FALSE(device_->reached(may_be_written));
  open_gate();
  device_->wait(may_be_written);
  free_slot(second, 2);
}

TEST_F(CudaDeviceTest, a_slot_may_be_written_after_the_last_use_that_is_told_when_it_is_given_back) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  std::byte* const beside = slot(2);
  const Fence last_use = device_->computation();
  launch(stream, beside);
  device_->unmap_slot(first, 2 * granule, last_use);
  device_->budget().release(Kind::parameter, 2 * granule);
  std::byte* const second = slot(2);
  EXPECT_EQ(second, first);
  write(second, std::byte{1});  // while the kernel is behind
  open_gate();
  free_slot(second, 2);
  free_slot(beside, 2);
}

TEST_F(CudaDeviceTest, a_slot_that_is_given_back_unused_is_still_in_use_by_who_had_it_before) {
  std::byte* const first = slot(16);
  std::atomic<bool> ended{false};
  launch(compute_stream(), first, [&] { ended = true; });
  free_slot(first, 16);
  std::byte* const second = slot(16);
  EXPECT_EQ(second, first);
  device_->unmap_slot(second, 16 * granule, Fence{});
  device_->budget().release(Kind::parameter, 16 * granule);
  std::future<bool> had_ended = std::async(std::launch::async, [&] {
    std::byte* const third = slot(1);
    const bool before = ended;
    free_slot(third, 1);
    return before;
  });
  open_gate();
  EXPECT_TRUE(had_ended.get());
}

TEST_F(CudaDeviceTest, an_allocation_that_reuses_memory_waits_for_kernels_that_use_it) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(1);
  std::atomic<bool> ended{false};
  launch(stream, first, [&] { ended = true; });
  free_slot(first, 1);
  std::future<bool> had_ended = std::async(std::launch::async, [&] {
    std::byte* const second = device_->allocate(100);
    const bool before = ended;
    device_->deallocate(second, 100);
    return before;
  });
  open_gate();
  EXPECT_TRUE(had_ended.get());
}

TEST_F(CudaDeviceTest, takes_the_slot_apart_that_has_been_unused_for_longest) {
  std::byte* const first = slot(4);
  std::byte* const second = slot(12);
  device_->computes_on(nullptr);
  free_slot(first, 4);
  free_slot(second, 12);
  std::byte* const third = slot(3);
  const std::size_t mapped = software_->calls("map");
  EXPECT_EQ(slot(12), second);
  EXPECT_EQ(software_->calls("map"), mapped) << "it is still there";
  free_slot(second, 12);
  free_slot(third, 3);
}

TEST_F(CudaDeviceTest, in_the_steady_state_nothing_is_made_or_mapped) {
  for (int round = 0; round < 10; ++round) {
    std::vector<std::byte*> slots;
    for (int i = 0; i < 4; ++i) slots.push_back(slot(3));
    if (round == 1) software_->fail_next("create_memory", "CUDA_ERROR_UNKNOWN");
    if (round == 1) software_->fail_next("map", "CUDA_ERROR_UNKNOWN");
    for (std::byte* each : slots) free_slot(each, 3);
  }
  EXPECT_EQ(software_->calls("create_memory"), 12u);
  EXPECT_EQ(software_->calls("map"), 12u);
}

TEST_F(CudaDeviceTest, granules_of_one_size_of_slot_are_mapped_for_another) {
  std::vector<std::byte*> slots;
  for (int i = 0; i < 16; ++i) slots.push_back(slot(1));
  for (std::byte* each : slots) free_slot(each, 1);
  std::byte* const whole = slot(16);
  EXPECT_EQ(software_->calls("create_memory"), 16u);
  free_slot(whole, 16);
}

// ---- Memory beside slots

TEST_F(CudaDeviceTest, keeps_no_more_than_the_budget_has_free_once_somebody_beside_it_grows) {
  std::byte* const first = slot(12);
  free_slot(first, 12);
  EXPECT_EQ(software_->physical_bytes(), 12 * granule);
  ASSERT_TRUE(device_->budget().try_reserve(Kind::other, 10 * granule));
  device_->make_room_outside();
  software_->take_beside(10 * granule);
  EXPECT_EQ(software_->physical_bytes(), capacity) << "and no less";
  software_->give_back_beside(10 * granule);
  device_->budget().release(Kind::other, 10 * granule);
}

TEST_F(CudaDeviceTest, makes_no_memory_beside_what_others_have_reserved) {
  std::byte* const first = slot(6);
  free_slot(first, 6);
  ASSERT_TRUE(device_->budget().try_reserve(Kind::other, 10 * granule));
  device_->make_room_outside();
  software_->take_beside(10 * granule);
  std::byte* const second = slot(5);
  EXPECT_LE(software_->peak_physical_bytes(), capacity);
  free_slot(second, 5);
  software_->give_back_beside(10 * granule);
  device_->budget().release(Kind::other, 10 * granule);
}

TEST_F(CudaDeviceTest, gives_all_that_it_keeps_back_when_it_is_told_to) {
  std::byte* const first = slot(3);
  std::byte* const second = slot(5);
  free_slot(second, 5);
  EXPECT_EQ(device_->give_back_free_memory(), 5 * granule);
  EXPECT_EQ(software_->physical_bytes(), 3 * granule);
  EXPECT_EQ(device_->physical_bytes(), 3 * granule);
  EXPECT_EQ(device_->give_back_free_memory(), 0u);
  free_slot(first, 3);
}

TEST_F(CudaDeviceTest, slots_kept_memory_and_what_others_use_stay_within_the_capacity_whatever_happens) {
  software_ =
      std::make_shared<SoftwareCuda>(SoftwareCuda::Options{.memory_bytes = 2 * capacity, .granule_bytes = granule});
  device_ = std::make_unique<CudaDevice>(software_, capacity);
  const CudaStream stream = compute_stream();
  open_gate();
  const auto slots = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 400; ++i) {
      const std::uint64_t granules = 1 + random() % 5;
      if (!device_->budget().try_reserve(Kind::parameter, granules * granule)) continue;
      std::byte* const mine = device_->map_slot(granules * granule);
      write(mine, static_cast<std::byte>(i));
      launch(stream, mine, [=] { EXPECT_EQ(*mine, static_cast<std::byte>(i)); });
      free_slot(mine, granules);
    }
  };
  const auto beside = [&] {
    std::mt19937_64 random(3);
    for (int i = 0; i < 400; ++i) {
      const std::uint64_t bytes = (1 + random() % 8) * granule;
      if (!device_->budget().try_reserve(Kind::other, bytes)) continue;
      device_->make_room_outside();
      software_->take_beside(bytes);
      std::this_thread::yield();
      software_->give_back_beside(bytes);
      device_->budget().release(Kind::other, bytes);
    }
  };
  std::vector<std::future<void>> threads;
  threads.push_back(std::async(std::launch::async, slots, 1));
  threads.push_back(std::async(std::launch::async, slots, 2));
  threads.push_back(std::async(std::launch::async, beside));
  for (std::future<void>& thread : threads) EXPECT_NO_THROW(thread.get());
  EXPECT_LE(software_->peak_physical_bytes(), capacity);
  EXPECT_EQ(device_->budget().used(), 0u);
}

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

TEST_F(CudaDeviceTest, where_the_driver_has_no_memory_left_slots_of_other_sizes_give_theirs) {
  std::byte* const first = slot(4);
  free_slot(first, 4);
  software_->take_beside(capacity - 4 * granule);  // another process
  std::byte* const second = slot(3);
  EXPECT_EQ(software_->peak_physical_bytes(), capacity);
  free_slot(second, 3);
  software_->give_back_beside(capacity - 4 * granule);
}

TEST_F(CudaDeviceTest, where_nothing_is_left_it_says_so_and_keeps_what_it_got) {
  software_->take_beside(capacity - 2 * granule);
  EXPECT_THROW(device_->map_slot(3 * granule), OutOfMemory);
  software_->give_back_beside(capacity - 2 * granule);
  std::byte* const memory = slot(3);
  EXPECT_EQ(software_->physical_bytes(), 3 * granule);
  free_slot(memory, 3);
}

TEST_F(CudaDeviceTest, a_slot_that_cannot_be_mapped_leaves_nothing_behind) {
  for (const char* call : {"reserve_addresses", "map", "allow_access"}) {
    software_->fail_next(call, "CUDA_ERROR_UNKNOWN", call == std::string("map") ? 2 : 0);
    EXPECT_THROW(device_->map_slot(4 * granule), IoError) << call;
    EXPECT_EQ(software_->physical_bytes(), 4 * granule) << "kept for the next";
  }
  std::byte* const memory = slot(4);
  EXPECT_EQ(software_->calls("create_memory"), 4u);
  free_slot(memory, 4);
}

TEST_F(CudaDeviceTest, a_slot_that_cannot_be_taken_apart_stays) {
  std::byte* const first = slot(16);
  free_slot(first, 16);
  software_->fail_next("unmap", "CUDA_ERROR_UNKNOWN");
  EXPECT_THROW(device_->map_slot(granule), IoError);
  EXPECT_EQ(slot(16), first);
  free_slot(first, 16);
}

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

TEST_F(CudaDeviceTest, what_is_no_slot_cannot_be_given_back) {
  std::byte memory{};
  testing::internal::CaptureStderr();
  device_->unmap_slot(&memory, 1);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("not in use"), std::string::npos);
  EXPECT_THROW(device_->map_slot(1), LogicError);
}

}  // namespace
}  // namespace terrace
