/// What every device promises, over each of them: the emulated one, CUDA's on a driver in software, and CUDA's on a
/// GPU. Device memory is reached by copies only.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/cuda_device.h"
#include "offload/emulated_device.h"
#include "offload/loaded_cuda_driver.h"
#include "tests/offload/software_cuda.h"

namespace terrace {
namespace {

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t MiB = 1024 * KiB;
constexpr std::uint64_t capacity = 16 * MiB;
constexpr std::byte untouched{0xee};

struct Block {
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
};

std::vector<std::byte> random_bytes(std::uint64_t seed, std::uint64_t bytes) {
  std::vector<std::uint64_t> words(bytes / 8 + 1);
  std::generate(words.begin(), words.end(), std::mt19937_64(seed));
  std::vector<std::byte> result(bytes);
  std::memcpy(result.data(), words.data(), bytes);
  return result;
}

/// A device and what a careful caller does around it: count first, give back after.
class DeviceContractTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("emulated")) {
      device_ = std::make_unique<EmulatedDevice>(capacity);
      return;
    }
    std::string why_not;
    std::shared_ptr<CudaDriver> driver;
    if (GetParam() == std::string("gpu")) {
      driver = load_cuda_driver(&why_not);
    } else {
      software_ = std::make_shared<SoftwareCuda>(
          SoftwareCuda::Options{.memory_bytes = capacity, .longest_delay = std::chrono::microseconds(200)});
      driver = software_;
    }
    if (driver == nullptr) GTEST_SKIP() << why_not;
    device_ = std::make_unique<CudaDevice>(std::move(driver), capacity);
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    EXPECT_EQ(device_->budget().used(), 0u);
    device_.reset();
    EXPECT_EQ(software_ == nullptr ? 0 : software_->physical_bytes(), 0u);
  }

  Block slot(std::uint64_t bytes) {
    EXPECT_TRUE(device_->budget().try_reserve(Kind::parameter, device_->slot_bytes(bytes)));
    return {device_->map_slot(bytes), bytes};
  }
  void free_slot(const Block& block) {
    device_->unmap_slot(block.memory, block.bytes);
    device_->budget().release(Kind::parameter, device_->slot_bytes(block.bytes));
  }
  Block allocation(std::uint64_t bytes) {
    EXPECT_TRUE(device_->budget().try_reserve(Kind::buffer, device_->allocation_bytes(bytes)));
    return {device_->allocate(bytes), bytes};
  }
  void free_allocation(const Block& block) {
    device_->deallocate(block.memory, block.bytes);
    device_->budget().release(Kind::buffer, device_->allocation_bytes(block.bytes));
  }

  void write(std::byte* memory, const std::vector<std::byte>& bytes) {
    device_->wait(device_->copy_in(memory, bytes.data(), bytes.size()));
  }
  std::vector<std::byte> read(const std::byte* memory, std::uint64_t bytes) {
    std::vector<std::byte> result(bytes);
    device_->wait(device_->copy_out(result.data(), memory, bytes));
    return result;
  }

  /// Marks both ends of a block as its owner's.
  void stamp(const Block& block, std::uint64_t owner) {
    const std::vector<std::byte> mark(std::min(block.bytes, 4 * KiB), static_cast<std::byte>(owner));
    write(block.memory, mark);
    write(block.memory + block.bytes - mark.size(), mark);
  }
  bool has_stamp(const Block& block, std::uint64_t owner) {
    const std::vector<std::byte> mark(std::min(block.bytes, 4 * KiB), static_cast<std::byte>(owner));
    return read(block.memory, mark.size()) == mark &&
           read(block.memory + block.bytes - mark.size(), mark.size()) == mark;
  }

  std::shared_ptr<SoftwareCuda> software_;
  std::unique_ptr<Device> device_;
};

INSTANTIATE_TEST_SUITE_P(On, DeviceContractTest, testing::Values("emulated", "cuda_in_software", "gpu"),
                         [](const testing::TestParamInfo<const char*>& device) { return std::string(device.param); });

TEST_P(DeviceContractTest, is_the_device_tier_with_its_capacity) {
  EXPECT_EQ(device_->name(), GetParam() == std::string("emulated") ? "emulated" : "cuda");
  EXPECT_EQ(device_->budget().tier(), Tier::device);
  EXPECT_EQ(device_->budget().capacity(), capacity);
}

TEST_P(DeviceContractTest, what_is_counted_covers_what_is_taken) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, 63 * KiB, 64 * KiB, 64 * KiB + 1, 3 * MiB}) {
    EXPECT_GE(device_->slot_bytes(bytes), bytes);
    EXPECT_GE(device_->allocation_bytes(bytes), bytes);
    EXPECT_EQ(device_->slot_bytes(device_->slot_bytes(bytes)), device_->slot_bytes(bytes));
  }
}

TEST_P(DeviceContractTest, bytes_come_in_and_out_unchanged_at_any_size_and_place_and_no_more) {
  const Block block = slot(300 * KiB);
  for (const std::uint64_t bytes :
       {std::uint64_t{1}, std::uint64_t{513}, 64 * KiB - 1, 128 * KiB, 256 * KiB + 12'345}) {
    for (const std::uint64_t offset : {0, 1, 100, 4096}) {
      write(block.memory, std::vector<std::byte>(block.bytes, untouched));
      const std::vector<std::byte> source = random_bytes(bytes + offset, bytes);
      write(block.memory + offset, source);
      EXPECT_TRUE(read(block.memory + offset, bytes) == source) << bytes << " B at " << offset;
      std::vector<std::byte> expected(block.bytes, untouched);
      std::copy(source.begin(), source.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
      EXPECT_TRUE(read(block.memory, block.bytes) == expected) << bytes << " B at " << offset;
    }
  }
  free_slot(block);
}

TEST_P(DeviceContractTest, a_fill_zeroes_its_range_and_no_more) {
  const Block block = slot(MiB);
  write(block.memory, std::vector<std::byte>(block.bytes, untouched));
  device_->wait(device_->fill_zero(block.memory + 100, 70'001));
  std::vector<std::byte> expected(MiB, untouched);
  std::fill(expected.begin() + 100, expected.begin() + 70'101, std::byte{});
  EXPECT_TRUE(read(block.memory, block.bytes) == expected);
  free_slot(block);
}

TEST_P(DeviceContractTest, what_comes_after_a_fence_finds_what_was_done_before_it) {
  const Block first = slot(2 * MiB);
  const Block second = slot(2 * MiB);
  std::vector<std::byte> source = random_bytes(7, 2 * MiB);
  std::vector<std::byte> between(source.size());
  std::vector<std::byte> back(source.size());
  for (int round = 0; round < 5; ++round) {
    source[0] ^= std::byte{1};
    // Nothing waits on the host until the end.
    const Fence in = device_->copy_in(first.memory, source.data(), source.size());
    const Fence out = device_->copy_out(between.data(), first.memory, between.size(), in);
    const Fence again = device_->copy_in(second.memory, between.data(), between.size(), out);
    const Fence zeroed = device_->fill_zero(second.memory, MiB, again);
    device_->wait(device_->copy_out(back.data(), second.memory, back.size(), zeroed));
    EXPECT_TRUE(between == source) << "round " << round;
    EXPECT_TRUE(std::all_of(back.begin(), back.begin() + MiB, [](std::byte each) { return each == std::byte{}; }));
    EXPECT_TRUE(std::equal(back.begin() + MiB, back.end(), source.begin() + MiB)) << "round " << round;
  }
  free_slot(first);
  free_slot(second);
}

TEST_P(DeviceContractTest, fences_stay_reached_once_they_were) {
  EXPECT_TRUE(device_->reached({}));
  device_->wait({});
  const Block block = slot(4 * KiB);
  const std::vector<std::byte> source = random_bytes(1, block.bytes);
  std::vector<Fence> fences;
  for (int i = 0; i < 300; ++i) fences.push_back(device_->copy_in(block.memory, source.data(), source.size()));
  device_->wait(fences.back());
  for (const Fence fence : fences) {
    EXPECT_TRUE(device_->reached(fence)) << "copies of one direction are done in order";
    device_->wait(fence);
  }
  EXPECT_TRUE(device_->reached(fences.front()));
  free_slot(block);
}

TEST_P(DeviceContractTest, where_nothing_is_computed_computation_has_ended) {
  EXPECT_TRUE(device_->reached(device_->computation()));
}

TEST_P(DeviceContractTest, slots_and_allocations_together_fill_the_capacity_and_hold_their_own_bytes) {
  for (int round = 0; round < 2; ++round) {
    std::vector<Block> slots{slot(4 * MiB), slot(4 * MiB)};
    std::vector<Block> allocations{allocation(4 * MiB), allocation(4 * MiB)};
    EXPECT_EQ(device_->budget().free(), 0u);
    EXPECT_THROW(device_->map_slot(4 * MiB), OutOfMemory);
    for (std::size_t i = 0; i < 2; ++i) {
      write(slots[i].memory, random_bytes(i, 4 * MiB));
      write(allocations[i].memory, random_bytes(100 + i, 4 * MiB));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(read(slots[i].memory, 4 * MiB) == random_bytes(i, 4 * MiB));
      EXPECT_TRUE(read(allocations[i].memory, 4 * MiB) == random_bytes(100 + i, 4 * MiB));
    }
    for (const Block& block : slots) free_slot(block);
    for (const Block& block : allocations) free_allocation(block);
  }
}

TEST_P(DeviceContractTest, bytes_freed_at_one_size_serve_any_other) {
  for (const std::uint64_t bytes : {4 * MiB, 2 * MiB, 6 * MiB, 16 * MiB, 10 * MiB, 2 * MiB}) {
    std::vector<Block> slots;
    while (device_->budget().free() >= device_->slot_bytes(bytes)) slots.push_back(slot(bytes));
    EXPECT_EQ(slots.size(), capacity / bytes);
    for (std::size_t i = 0; i < slots.size(); ++i) stamp(slots[i], i);
    for (std::size_t i = 0; i < slots.size(); ++i) EXPECT_TRUE(has_stamp(slots[i], i));
    for (const Block& block : slots) free_slot(block);
  }
}

TEST_P(DeviceContractTest, allocations_are_aligned_to_64_bytes) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{100}, 63 * KiB, 64 * KiB, MiB}) {
    const Block block = allocation(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.memory) % 64, 0u) << bytes;
    free_allocation(block);
  }
}

TEST_P(DeviceContractTest, copies_from_and_to_pinned_memory_hold_their_bytes_too) {
  std::vector<std::byte> host = random_bytes(3, MiB);
  const std::vector<std::byte> source = host;
  device_->pin(host);
  const Block block = slot(host.size());
  write(block.memory, host);
  std::fill(host.begin(), host.end(), std::byte{});
  device_->wait(device_->copy_out(host.data(), block.memory, host.size()));
  EXPECT_TRUE(host == source);
  free_slot(block);
  device_->unpin(host);
}

TEST_P(DeviceContractTest, threads_keep_their_own_bytes_and_give_all_of_them_back) {
  std::atomic<bool> changed{false};
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::pair<Block, bool>> held;
    const auto free_last = [&] {
      const auto [block, is_slot] = held.back();
      held.pop_back();
      if (!has_stamp(block, seed)) changed = true;
      is_slot ? free_slot(block) : free_allocation(block);
    };
    for (int i = 0; i < 300; ++i) {
      const std::uint64_t bytes = random() % 4 == 0 ? 1 + random() % (3 * MiB) : 1 + random() % (100 * KiB);
      const bool is_slot = random() % 2 == 0;
      const std::uint64_t counted = is_slot ? device_->slot_bytes(bytes) : device_->allocation_bytes(bytes);
      if (held.size() < 40 && device_->budget().try_reserve(is_slot ? Kind::parameter : Kind::buffer, counted)) {
        held.emplace_back(Block{is_slot ? device_->map_slot(bytes) : device_->allocate(bytes), bytes}, is_slot);
        stamp(held.back().first, seed);
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        free_last();
      }
    }
    while (!held.empty()) free_last();
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 1; i <= 3; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(changed);
}

}  // namespace
}  // namespace terrace
