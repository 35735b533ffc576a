/// Slots of the CUDA device, on a driver in software: when one may be taken apart or used again, and what is kept.

#include "offload/cuda_slots.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <future>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/offload/cuda_device_fixture.h"

namespace terrace {
namespace {

class CudaSlotsTest : public CudaDeviceTest {
 protected:
  void TearDown() override {
    if (rest_ != nullptr) free_slot(rest_, granules_of_rest_);
    CudaDeviceTest::TearDown();
  }
  /// Takes what is left: who comes next gets what is given back.
  void fill_up() {
    granules_of_rest_ = device_->budget().free() / granule;
    rest_ = slot(granules_of_rest_);
  }
  /// Opens the gate while another thread asks for a slot of a granule. Whether `ended` was set once it had that.
  bool had_ended_by_the_next_slot(const std::atomic<bool>& ended) {
    std::future<bool> had_ended = std::async(std::launch::async, [&] {
      std::byte* const next = slot(1);
      const bool before = ended;
      free_slot(next, 1);
      return before;
    });
    open_gate();
    return had_ended.get();
  }

 private:
  std::byte* rest_ = nullptr;
  std::uint64_t granules_of_rest_ = 0;
};

TEST_F(CudaSlotsTest, a_slot_that_kernels_use_is_not_taken_apart_before_they_have_ended) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(16);
  std::atomic<bool> ended{false};
  launch(stream, first, [&] { ended = true; });
  free_slot(first, 16);
  EXPECT_TRUE(had_ended_by_the_next_slot(ended));
}

TEST_F(CudaSlotsTest,
       a_slot_that_kernels_use_serves_the_next_of_its_size_where_no_room_is_left_and_copies_wait_for_them) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  fill_up();
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

TEST_F(CudaSlotsTest, a_slot_that_kernels_use_is_left_alone_where_there_is_room_for_another) {
  std::byte* const first = slot(2);
  launch(compute_stream(), first);
  free_slot(first, 2);
  std::byte* const second = slot(2);
  EXPECT_NE(second, first);
  write(second, std::byte{1});  // while the kernel is behind
  open_gate();
  software_->synchronize(compute_.back());
  std::byte* const third = slot(2);
  EXPECT_EQ(third, first) << "which has been used";
  free_slot(second, 2);
  free_slot(third, 2);
  EXPECT_EQ(software_->physical_bytes(), 4 * granule);
}

TEST_F(CudaSlotsTest, of_two_slots_that_serves_next_whose_last_use_ends_first) {
  std::byte* const used = slot(2);
  std::byte* const unused = slot(2);
  fill_up();
  const Fence before = device_->computation();
  launch(compute_stream(), used);
  free_slot(used, 2);
  device_->unmap_slot(unused, 2 * granule, before);
  device_->budget().release(Kind::parameter, 2 * granule);
  EXPECT_EQ(slot(2), unused);
  open_gate();
  free_slot(unused, 2);
}

TEST_F(CudaSlotsTest, a_slot_that_kernels_use_serves_the_next_where_the_device_has_refused_another) {
  software_->take_beside(capacity - 2 * granule);  // another process
  std::byte* const first = slot(2);
  EXPECT_THROW(device_->map_slot(3 * granule), OutOfMemory);
  launch(compute_stream(), first);
  free_slot(first, 2);
  std::byte* const second = slot(2);
  EXPECT_EQ(second, first) << "with the kernel before its gate";
  open_gate();
  free_slot(second, 2);
  software_->give_back_beside(capacity - 2 * granule);
}

TEST_F(CudaSlotsTest, a_fill_of_a_reused_slot_waits_for_kernels_that_use_it) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  fill_up();
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

TEST_F(CudaSlotsTest, zeroing_nothing_of_a_reused_slot_ends_when_it_may_be_written) {
  std::byte* const first = slot(2);
  fill_up();
  launch(compute_stream(), first);
  free_slot(first, 2);
  std::byte* const second = slot(2);
  const Fence may_be_written = device_->fill_zero(second, 0, {});
  EXPECT_FALSE(device_->reached(may_be_written));
  open_gate();
  device_->wait(may_be_written);
  free_slot(second, 2);
}

TEST_F(CudaSlotsTest, a_slot_may_be_written_after_the_last_use_that_is_told_when_it_is_given_back) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(2);
  std::byte* const beside = slot(2);
  fill_up();
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

TEST_F(CudaSlotsTest, a_slot_that_is_given_back_unused_is_still_in_use_by_who_had_it_before) {
  std::byte* const first = slot(16);
  std::atomic<bool> ended{false};
  launch(compute_stream(), first, [&] { ended = true; });
  free_slot(first, 16);
  std::byte* const second = slot(16);
  EXPECT_EQ(second, first);
  device_->unmap_slot(second, 16 * granule, Fence{});
  device_->budget().release(Kind::parameter, 16 * granule);
  EXPECT_TRUE(had_ended_by_the_next_slot(ended));
}

TEST_F(CudaSlotsTest, an_allocation_that_reuses_memory_waits_for_kernels_that_use_it) {
  const CudaStream stream = compute_stream();
  std::byte* const first = slot(1);
  fill_up();
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

TEST_F(CudaSlotsTest, takes_the_slot_apart_that_has_been_unused_for_longest) {
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

TEST_F(CudaSlotsTest, in_the_steady_state_nothing_is_made_or_mapped) {
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

TEST_F(CudaSlotsTest, granules_of_one_size_of_slot_are_mapped_for_another) {
  std::vector<std::byte*> slots;
  for (int i = 0; i < 16; ++i) slots.push_back(slot(1));
  for (std::byte* each : slots) free_slot(each, 1);
  std::byte* const whole = slot(16);
  EXPECT_EQ(software_->calls("create_memory"), 16u);
  free_slot(whole, 16);
}

// ---- Memory beside slots

TEST_F(CudaSlotsTest, keeps_no_more_than_the_budget_has_free_once_somebody_beside_it_grows) {
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

TEST_F(CudaSlotsTest, makes_no_memory_beside_what_others_have_reserved) {
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

TEST_F(CudaSlotsTest, gives_all_that_it_keeps_back_when_it_is_told_to) {
  std::byte* const first = slot(3);
  std::byte* const second = slot(5);
  free_slot(second, 5);
  EXPECT_EQ(device_->give_back_free_memory(), 5 * granule);
  EXPECT_EQ(software_->physical_bytes(), 3 * granule);
  EXPECT_EQ(device_->physical_bytes(), 3 * granule);
  EXPECT_EQ(device_->give_back_free_memory(), 0u);
  free_slot(first, 3);
}

TEST_F(CudaSlotsTest, slots_kept_memory_and_what_others_use_stay_within_the_capacity_whatever_happens) {
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

// ---- Errors

TEST_F(CudaSlotsTest, where_the_driver_has_no_memory_left_slots_of_other_sizes_give_theirs) {
  std::byte* const first = slot(4);
  free_slot(first, 4);
  software_->take_beside(capacity - 4 * granule);  // another process
  std::byte* const second = slot(3);
  EXPECT_EQ(software_->peak_physical_bytes(), capacity);
  free_slot(second, 3);
  software_->give_back_beside(capacity - 4 * granule);
}

TEST_F(CudaSlotsTest, where_nothing_is_left_it_says_so_and_keeps_what_it_got) {
  software_->take_beside(capacity - 2 * granule);
  EXPECT_THROW(device_->map_slot(3 * granule), OutOfMemory);
  software_->give_back_beside(capacity - 2 * granule);
  std::byte* const memory = slot(3);
  EXPECT_EQ(software_->physical_bytes(), 3 * granule);
  free_slot(memory, 3);
}

TEST_F(CudaSlotsTest, a_slot_that_cannot_be_mapped_leaves_nothing_behind) {
  for (const char* call : {"reserve_addresses", "map", "allow_access"}) {
    software_->fail_next(call, "CUDA_ERROR_UNKNOWN", call == std::string("map") ? 2 : 0);
    EXPECT_THROW(device_->map_slot(4 * granule), IoError) << call;
    EXPECT_EQ(software_->physical_bytes(), 4 * granule) << "kept for the next";
  }
  std::byte* const memory = slot(4);
  EXPECT_EQ(software_->calls("create_memory"), 4u);
  free_slot(memory, 4);
}

TEST_F(CudaSlotsTest, a_slot_that_cannot_be_taken_apart_stays) {
  std::byte* const first = slot(16);
  free_slot(first, 16);
  software_->fail_next("unmap", "CUDA_ERROR_UNKNOWN");
  EXPECT_THROW(device_->map_slot(granule), IoError);
  EXPECT_EQ(slot(16), first);
  free_slot(first, 16);
}

TEST_F(CudaSlotsTest, what_is_no_slot_cannot_be_given_back) {
  std::byte memory{};
  testing::internal::CaptureStderr();
  device_->unmap_slot(&memory, 1);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("not in use"), std::string::npos);
  EXPECT_THROW(device_->map_slot(1), LogicError);
}

}  // namespace
}  // namespace terrace
