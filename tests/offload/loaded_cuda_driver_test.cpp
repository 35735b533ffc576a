/// The driver and the management library of this machine. Where there is no GPU, what is said instead.

#include "offload/loaded_cuda_driver.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/nvml.h"

namespace terrace {
namespace {

TEST(LoadedCudaDriver, is_there_or_says_why_not) {
  std::string why_not;
  const std::shared_ptr<CudaDriver> driver = load_cuda_driver(&why_not);
  EXPECT_EQ(driver == nullptr, !why_not.empty()) << why_not;
  EXPECT_EQ(load_cuda_driver(nullptr) == nullptr, driver == nullptr);
}

TEST(Nvml, sees_a_gpu_or_says_why_not) {
  std::string why_not;
  const std::optional<GpuState> state = gpu_state("", &why_not);
  EXPECT_EQ(state.has_value(), why_not.empty()) << why_not;
  EXPECT_EQ(gpu_state("", nullptr).has_value(), state.has_value());
}

class LoadedCudaDriverTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    driver_ = load_cuda_driver(&why_not);
    if (driver_ == nullptr) GTEST_SKIP() << why_not;
  }

  std::shared_ptr<CudaDriver> driver_;
};

TEST_F(LoadedCudaDriverTest, says_what_the_gpu_is) {
  const CudaProperties properties = driver_->properties();
  EXPECT_FALSE(properties.name.empty());
  EXPECT_GE(properties.compute_major, 5);
  EXPECT_GE(properties.device_count, 1);
  const CudaMemoryInfo memory = driver_->memory_info();
  EXPECT_GT(memory.free_bytes, 0u);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
  EXPECT_EQ(driver_->granularity() % 4096, 0u);
}

TEST_F(LoadedCudaDriverTest, and_nvml_speak_of_the_same_gpu) {
  const CudaProperties properties = driver_->properties();
  std::string why_not;
  const std::optional<GpuState> state = gpu_state(properties.pci_address, &why_not);
  if (!state) GTEST_SKIP() << why_not;
  EXPECT_EQ(state->name, properties.name);
  EXPECT_FALSE(state->driver_version.empty());
  EXPECT_FALSE(gpu_state("ffff:ff:1f.0", &why_not).has_value());
  EXPECT_NE(why_not, "");
}

TEST_F(LoadedCudaDriverTest, refuses_more_gpu_memory_than_there_is_as_out_of_memory) {
  const std::uint64_t granule = driver_->granularity();
  const std::uint64_t too_much = driver_->memory_info().total_bytes / granule * granule + granule;
  EXPECT_THROW(driver_->create_memory(too_much), OutOfMemory);
}

TEST_F(LoadedCudaDriverTest, names_the_gpu_drivers_error) {
  try {
    driver_->unmap(nullptr, driver_->granularity());
    ADD_FAILURE() << "it was not refused";
  } catch (const IoError& error) {
    EXPECT_NE(error.message().find("(CUDA_ERROR_INVALID_VALUE)"), std::string::npos) << error.message();
  }
}

}  // namespace
}  // namespace terrace
