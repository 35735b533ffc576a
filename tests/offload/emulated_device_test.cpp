/// What is the emulated device's own; what every device promises is in device_contract_test.cpp.

#include "offload/emulated_device.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "offload/emulated_computation.h"
#include "tests/offload/pages_in_process.h"

namespace terrace {
namespace {

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t MiB = 1024 * KiB;
constexpr std::uint64_t capacity = 64 * MiB;
/// The kernel counts pages in batches.
constexpr std::uint64_t slack = 2 * MiB;

struct Block {
  std::byte* memory;
  std::uint64_t bytes;
};

/// A device and what a careful caller does around it: count first, give back after.
class EmulatedDeviceTest : public testing::Test {
 protected:
  Block slot(std::uint64_t bytes) {
    EXPECT_TRUE(device_.budget().try_reserve(Kind::parameter, device_.slot_bytes(bytes)));
    const Block block{device_.map_slot(bytes), bytes};
    std::memset(block.memory, 1, bytes);
    return block;
  }
  void free_slot(const Block& block) {
    device_.unmap_slot(block.memory, block.bytes);
    device_.budget().release(Kind::parameter, device_.slot_bytes(block.bytes));
  }
  Block tensor(std::uint64_t bytes) {
    EXPECT_TRUE(device_.budget().try_reserve(Kind::activation, device_.allocation_bytes(bytes)));
    const Block block{device_.allocate(bytes), bytes};
    std::memset(block.memory, 2, bytes);
    return block;
  }
  void free_tensor(const Block& block) {
    device_.deallocate(block.memory, block.bytes);
    device_.budget().release(Kind::activation, device_.allocation_bytes(block.bytes));
  }

  const std::uint64_t pages_before_ = pages_in_process();
  EmulatedDevice device_{capacity};
};

TEST_F(EmulatedDeviceTest, what_is_counted_for_a_tensor_is_little_more_than_it_takes) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, 63 * KiB, 64 * KiB, 64 * KiB + 1, 3 * MiB}) {
    EXPECT_LT(device_.allocation_bytes(bytes), bytes + 4 * KiB);
  }
}

TEST_F(EmulatedDeviceTest, what_slots_free_serves_tensors_and_the_reverse_within_the_capacity) {
  for (int round = 0; round < 3; ++round) {
    std::vector<Block> slots;
    for (int i = 0; i < 16; ++i) slots.push_back(slot(4 * MiB));
    EXPECT_LE(pages_in_process(), pages_before_ + capacity + slack) << "slots, round " << round;
    for (const Block& block : slots) free_slot(block);

    std::vector<Block> tensors;
    for (int i = 0; i < 21; ++i) tensors.push_back(tensor(3 * MiB));
    EXPECT_LE(pages_in_process(), pages_before_ + capacity + slack) << "tensors, round " << round;
    for (const Block& block : tensors) free_tensor(block);
  }
}

TEST_F(EmulatedDeviceTest, a_tensor_of_a_slots_size_gets_its_pages) {
  const Block first = slot(MiB);
  free_slot(first);
  const Block second = tensor(MiB);
  EXPECT_EQ(second.memory, first.memory);
  free_tensor(second);
}

TEST_F(EmulatedDeviceTest, what_slots_free_serves_small_tensors_too) {
  std::vector<Block> slots;
  for (int i = 0; i < 16; ++i) slots.push_back(slot(4 * MiB));
  for (const Block& block : slots) free_slot(block);
  EXPECT_GE(pages_in_process(), pages_before_ + capacity - slack) << "they are kept";

  std::vector<Block> tensors;
  for (int i = 0; i < 2048; ++i) tensors.push_back(tensor(32 * KiB));  // all of the capacity
  EXPECT_LE(pages_in_process(), pages_before_ + slack) << "and make room for them";
  for (const Block& block : tensors) free_tensor(block);
}

/// A few bytes on a device behind a link of some speed.
struct Linked {
  explicit Linked(LinkSpeed speed) : emulated(capacity, speed) {}

  EmulatedDevice emulated;
  Device& device = emulated;
  std::array<std::byte, 1000> on_device{};
  std::array<std::byte, 1000> on_host{};

  Fence copy_in(std::uint64_t bytes, Fence after = {}) {
    return device.copy_in(on_device.data(), on_host.data(), bytes, after);
  }
  Fence copy_out(std::uint64_t bytes, Fence after = {}) {
    return device.copy_out(on_host.data(), on_device.data(), bytes, after);
  }
};

constexpr LinkSpeed a_byte_a_second{.bytes_per_second = 1};

TEST(EmulatedDeviceFences, without_a_speed_all_are_reached_at_once) {
  Linked world({});
  EXPECT_TRUE(world.device.reached({}));
  EXPECT_TRUE(world.device.reached(world.device.computation()));
  EXPECT_TRUE(world.device.reached(world.copy_in(1000)));
  EXPECT_TRUE(world.device.reached(world.copy_out(1000)));
  EXPECT_TRUE(world.device.reached(world.device.fill_zero(world.on_device.data(), 1000)));
}

TEST(EmulatedDeviceFences, behind_a_slow_link_a_copy_is_not_there_yet) {
  Linked world(a_byte_a_second);
  EXPECT_FALSE(world.device.reached(world.copy_in(1000)));
  EXPECT_FALSE(world.device.reached(world.copy_out(1000)));
}

TEST(EmulatedDeviceFences, of_one_direction_follow_each_other_and_directions_do_not_wait_for_each_other) {
  Linked world(a_byte_a_second);
  const Fence in = world.copy_in(1000);
  const Fence out = world.copy_out(1);
  EXPECT_LT(out, in);
  EXPECT_GT(world.copy_in(1), in);
  EXPECT_GT(world.copy_out(1), out);
}

TEST(EmulatedDeviceFences, zeroing_crosses_no_link) {
  Linked world(a_byte_a_second);
  world.copy_in(1000);
  EXPECT_TRUE(world.device.reached(world.device.fill_zero(world.on_device.data(), 1000)));
}

TEST(EmulatedDeviceFences, are_reached_once_waited_for) {
  Linked world({.bytes_per_second = 1'000'000, .latency_ns = 1000});
  const Fence first = world.copy_in(1000);
  const Fence second = world.copy_in(1000);
  world.device.wait(second);
  EXPECT_TRUE(world.device.reached(first));
  EXPECT_TRUE(world.device.reached(second));
}

constexpr std::int64_t fence_ns(Fence fence) { return static_cast<std::int64_t>(fence); }

TEST(EmulatedDeviceFences, a_copy_takes_its_time_after_the_fence_it_is_given) {
  Linked world(a_byte_a_second);
  const Fence in = world.copy_in(1000);
  const Fence out = world.copy_out(10, in);
  EXPECT_EQ(fence_ns(out) - fence_ns(in), 10'000'000'000);
  EXPECT_EQ(world.device.fill_zero(world.on_device.data(), 1000, in), in);
}

TEST(EmulatedDeviceFences, without_a_speed_a_copy_is_there_when_its_fence_is_reached) {
  Linked slow(a_byte_a_second);
  Linked world({});
  const Fence later = slow.copy_in(1000);
  EXPECT_EQ(world.copy_in(1000, later), later);
  EXPECT_EQ(world.copy_out(1000, later), later);
}

TEST(EmulatedDeviceFences, computation_ends_when_all_that_is_queued_has) {
  Linked world({});
  EmulatedComputation::of_this_process().queue(0.01);
  EXPECT_EQ(fence_ns(world.device.computation()), EmulatedComputation::of_this_process().ends_ns());
  world.device.wait(world.device.computation());
  EXPECT_TRUE(world.device.reached(world.device.computation()));
}

TEST(EmulatedComputation, pieces_follow_each_other) {
  EmulatedComputation computation;
  const std::int64_t before_ns = monotonic_ns();
  computation.queue(1000);
  const std::int64_t first_ns = computation.ends_ns();
  EXPECT_GE(first_ns, before_ns + 1'000'000'000'000);
  EXPECT_LE(first_ns, monotonic_ns() + 1'000'000'000'000);
  computation.queue(5);
  EXPECT_EQ(computation.ends_ns() - first_ns, 5'000'000'000);
}

TEST(EmulatedComputation, begins_no_sooner_than_it_is_queued) {
  EmulatedComputation computation;
  computation.queue(1e-9);
  computation.wait();
  const std::int64_t before_ns = monotonic_ns();
  computation.queue(1);
  EXPECT_GE(computation.ends_ns(), before_ns + 1'000'000'000);
}

TEST(EmulatedComputation, of_several_threads_adds_up) {
  EmulatedComputation computation;
  computation.queue(1000);
  const std::int64_t first_ns = computation.ends_ns();
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (int piece = 0; piece < 1000; ++piece) computation.queue(0.001);
      });
    }
  }
  EXPECT_EQ(computation.ends_ns() - first_ns, 4'000'000'000);
}

}  // namespace
}  // namespace terrace
