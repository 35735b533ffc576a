/// The device of CUDA on a driver in software, streams that compute on it, and a kernel that waits for a gate.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "offload/cuda_device.h"
#include "tests/offload/software_cuda.h"

namespace terrace {

inline constexpr std::uint64_t granule = 64 << 10;
inline constexpr std::uint64_t capacity = 16 * granule;

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

}  // namespace terrace
