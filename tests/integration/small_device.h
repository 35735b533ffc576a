/// Sessions whose device does not hold what a program saves for backward, and small programs that save much.
#pragma once

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "integration/session.h"
#include "tests/base/temporary_folder.h"

namespace terrace::testing {

/// What is saved rests where the test's parameter says: on the host, or on NVMe.
class SmallDeviceTest : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr std::uint64_t device_bytes = std::uint64_t{10} << 20;

  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_before_); }

  Config config(std::uint64_t device_memory = device_bytes) const {
    Config config;
    config.device.kind = "emulated";
    config.device.memory = device_memory;
    config.host.memory = std::uint64_t{GetParam() == "host" ? 96U : 8U} << 20;
    config.nvme.paths = {folder_.path()};
    config.nvme.memory = std::uint64_t{128} << 20;
    config.placement.chunk = 64 << 10;
    config.placement.activations = GetParam();
    config.log.level = LogLevel::error;
    return config;
  }
  Tier home() const { return GetParam() == "host" ? Tier::host : Tier::nvme; }

 private:
  const int threads_before_ = at::get_num_threads();
  TemporaryFolder folder_;
};

/// A MiB.
inline at::Tensor wide_input() { return torch::linspace(-1, 1, 256 << 10).requires_grad_(); }

/// Each of the results is saved.
inline at::Tensor twenty_times_tanh(at::Tensor x) {
  for (int i = 0; i < 20; ++i) x = x.tanh();
  return x;
}
inline at::Tensor chain(const at::Tensor& x) { return twenty_times_tanh(x).square().mean(); }

}  // namespace terrace::testing
