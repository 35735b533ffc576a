/// A GPU in software that falls behind the program when a test wants it to, and catches up when it is told to.
#pragma once

#include <cstdint>
#include <memory>

#include <gtest/gtest.h>

#include "offload/cuda_device.h"
#include "tests/offload/software_cuda.h"
#include "tests/offload/software_cuda_stream.h"

namespace terrace {

class CudaBehind : public testing::Test {
 protected:
  static constexpr std::uint64_t granule = 64 << 10;
  static constexpr std::uint64_t slots = 3;  ///< of a granule, that it has room for

  CudaBehind() : driver_(std::make_shared<SoftwareCuda>()), compute_(driver_->create_stream()) {
    device_ = std::make_unique<CudaDevice>(driver_, slots * granule);
    device_->computes_on(compute_);
  }
  ~CudaBehind() override {
    catch_up();
    device_.reset();
    driver_->destroy_stream(compute_);
  }
  void fall_behind() {
    driver_->synchronize(compute_);
    driver_->launch(compute_, {}, [this] { may_end_.wait(); });
  }
  /// Once and for all.
  void catch_up() {
    may_end_.set();
    driver_->synchronize(compute_);
  }

  std::shared_ptr<SoftwareCuda> driver_;
  CudaStream compute_;
  Mark may_end_;
  std::unique_ptr<CudaDevice> device_;
};

}  // namespace terrace
