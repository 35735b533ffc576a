/// What only a GPU can show of its device: real work that is behind, and real memory. Long fills stand for kernels.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/cuda_device.h"
#include "offload/loaded_cuda_driver.h"

namespace terrace {
namespace {

constexpr std::uint64_t MiB = std::uint64_t{1} << 20;
constexpr std::uint64_t capacity = 512 * MiB;
constexpr std::uint64_t slot_bytes = 256 * MiB;

class CudaDeviceOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    driver_ = load_cuda_driver(&why_not);
    if (driver_ == nullptr) GTEST_SKIP() << why_not;
    compute_ = driver_->create_stream();
    device_ = std::make_unique<CudaDevice>(driver_, capacity);
    device_->computes_on(compute_);
  }
  void TearDown() override {
    if (driver_ == nullptr) return;
    device_.reset();
    driver_->destroy_stream(compute_);
  }

  /// Some milliseconds of work, at the end of which the slot holds the value.
  void compute(std::byte* slot, std::byte value) {
    for (int i = 0; i < 100; ++i) driver_->fill(slot, std::byte{0xff}, slot_bytes, compute_);
    driver_->fill(slot, value, slot_bytes, compute_);
  }
  std::byte at(const std::byte* memory, Fence after = {}) {
    std::byte value{};
    device_->wait(device_->copy_out(&value, memory, 1, after));
    return value;
  }

  std::shared_ptr<CudaDriver> driver_;
  CudaStream compute_ = nullptr;
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaDeviceOnGpu, computation_on_a_gpu_is_behind_and_copies_out_come_after_it) {
  std::byte* const slot = device_->map_slot(slot_bytes);
  compute(slot, std::byte{7});
  const Fence computed = device_->computation();
  EXPECT_FALSE(device_->reached(computed)) << "or the other tests here show nothing";
  EXPECT_EQ(at(slot + slot_bytes - 1, computed), std::byte{7});
  EXPECT_TRUE(device_->reached(computed));
  device_->unmap_slot(slot, slot_bytes);
}

TEST_F(CudaDeviceOnGpu, what_comes_into_a_reused_slot_on_a_gpu_comes_after_the_work_that_used_it) {
  ASSERT_TRUE(device_->budget().try_reserve(Kind::other, capacity));  // so that there is no room for another slot
  std::byte* const first = device_->map_slot(slot_bytes);
  compute(first, std::byte{7});
  device_->unmap_slot(first, slot_bytes);
  std::byte* const second = device_->map_slot(slot_bytes);
  EXPECT_EQ(second, first);
  const std::vector<std::byte> source(slot_bytes, std::byte{1});
  device_->wait(device_->copy_in(second, source.data(), source.size(), {}));
  driver_->synchronize(compute_);
  for (const std::uint64_t offset : {std::uint64_t{0}, slot_bytes / 2, slot_bytes - 1}) {
    EXPECT_EQ(at(second + offset), std::byte{1});
  }
  device_->unmap_slot(second, slot_bytes);
  device_->budget().release(Kind::other, capacity);
}

TEST_F(CudaDeviceOnGpu, memory_of_a_slot_that_work_on_a_gpu_uses_is_mapped_elsewhere_after_that_work) {
  std::byte* const first = device_->map_slot(slot_bytes);
  std::byte* const beside = device_->map_slot(slot_bytes);
  compute(first, std::byte{7});
  device_->unmap_slot(first, slot_bytes);
  std::byte* const second = device_->map_slot(slot_bytes / 2);
  device_->wait(device_->fill_zero(second, slot_bytes / 2, {}));
  EXPECT_NO_THROW(driver_->synchronize(compute_)) << "what is unmapped under work breaks it";
  EXPECT_EQ(at(second), std::byte{});
  EXPECT_EQ(at(second + slot_bytes / 2 - 1), std::byte{});
  device_->unmap_slot(second, slot_bytes / 2);
  device_->unmap_slot(beside, slot_bytes);
}

TEST_F(CudaDeviceOnGpu, gpu_memory_is_taken_for_slots_and_given_back) {
  // Others may use the GPU too: what is seen of all of its memory is right but for some of them.
  const std::uint64_t free_before = driver_->memory_info().free_bytes;
  std::byte* const first = device_->map_slot(slot_bytes);
  std::byte* const second = device_->map_slot(slot_bytes);
  EXPECT_EQ(device_->physical_bytes(), capacity);
  EXPECT_NEAR(static_cast<double>(free_before - driver_->memory_info().free_bytes), static_cast<double>(capacity),
              static_cast<double>(64 * MiB));
  device_->unmap_slot(first, slot_bytes);
  device_->unmap_slot(second, slot_bytes);
  EXPECT_EQ(device_->give_back_free_memory(), capacity);
  EXPECT_NEAR(static_cast<double>(free_before), static_cast<double>(driver_->memory_info().free_bytes),
              static_cast<double>(64 * MiB));
}

TEST_F(CudaDeviceOnGpu, host_memory_is_pinned_for_a_gpu) {
  std::vector<std::byte> host(64 * MiB, std::byte{5});
  driver_->register_host(host);
  EXPECT_THROW(driver_->register_host(host), IoError) << "it is already";
  std::byte* const slot = device_->map_slot(host.size());
  const Fence copied = device_->copy_in(slot, host.data(), host.size(), {});
  device_->wait(copied);
  EXPECT_EQ(at(slot + host.size() - 1), std::byte{5});
  driver_->unregister_host(host);
  device_->unmap_slot(slot, host.size());
}

}  // namespace
}  // namespace terrace
