#include "offload/choose_device.h"

#include <algorithm>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fallback.h"
#include "tests/offload/software_cuda.h"

namespace terrace {
namespace {

std::string it_can() { return ""; }

std::shared_ptr<CudaDriver> load_software(std::string* why_not) {
  why_not->clear();
  return std::make_shared<SoftwareCuda>();
}

std::shared_ptr<CudaDriver> load_nothing(std::string* why_not) {
  *why_not = "the test has no driver";
  return nullptr;
}

Config::Device of_kind(const char* kind) {
  Config::Device config;
  config.kind = kind;
  return config;
}

bool noted(const std::string& reason) {
  const std::vector<Fallback> all = noted_fallbacks();
  return std::any_of(all.begin(), all.end(), [&](const Fallback& each) {
    return each.what == "device: emulated on the CPU" && each.reason == reason;
  });
}

TEST(ChooseDevice, takes_cuda_where_there_is_one) {
  for (const char* kind : {"auto", "cuda"}) {
    const DeviceChoice choice = choose_device(of_kind(kind), it_can, load_software);
    EXPECT_NE(choice.driver, nullptr);
    EXPECT_EQ(choice.why_not, "");
  }
}

TEST(ChooseDevice, auto_falls_back_to_the_emulated_device_with_one_line_that_says_why) {
  testing::internal::CaptureStderr();
  const DeviceChoice choice = choose_device(of_kind("auto"), it_can, load_nothing);
  choose_device(of_kind("auto"), it_can, load_nothing);
  const std::string logged = testing::internal::GetCapturedStderr();
  EXPECT_EQ(choice.driver, nullptr);
  EXPECT_EQ(choice.why_not, "the test has no driver");
  EXPECT_TRUE(noted("the test has no driver"));
  const std::string line = "device: emulated on the CPU, because the test has no driver";
  ASSERT_NE(logged.find(line), std::string::npos) << logged;
  EXPECT_EQ(logged.find(line, logged.find(line) + 1), std::string::npos) << logged;
}

TEST(ChooseDevice, falls_back_where_the_program_cannot_compute_there) {
  const DeviceChoice choice = choose_device(
      of_kind("auto"), [] { return "it has no kernels"; }, load_software);
  EXPECT_EQ(choice.driver, nullptr);
  EXPECT_EQ(choice.why_not, "it has no kernels");
}

TEST(ChooseDevice, asks_nobody_where_the_emulated_device_is_wanted) {
  const auto fail = [] {
    ADD_FAILURE();
    return "";
  };
  const DeviceChoice choice = choose_device(of_kind("emulated"), fail, [&](std::string*) {
    fail();
    return nullptr;
  });
  EXPECT_EQ(choice.driver, nullptr);
  EXPECT_EQ(choice.why_not, "");
}

TEST(ChooseDevice, refuses_cuda_where_there_is_none_and_says_the_way_out) {
  try {
    choose_device(of_kind("cuda"), it_can, load_nothing);
    ADD_FAILURE() << "it was not refused";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.message(), "device.kind is \"cuda\", but the test has no driver");
    EXPECT_EQ(error.hint(), "set device.kind to \"auto\", which emulates a device where there is none");
  }
  EXPECT_THROW(choose_device(
                   of_kind("cuda"), [] { return "no kernels"; }, load_software),
               ConfigError);
}

TEST(ChooseDevice, refuses_the_emulated_devices_settings_where_auto_finds_cuda) {
  Config::Device config = of_kind("auto");
  config.link = 1'000'000;
  EXPECT_THROW(choose_device(config, it_can, load_software), ConfigError);
  config.link.reset();
  config.latency_us = 5;
  EXPECT_THROW(choose_device(config, it_can, load_software), ConfigError);
  EXPECT_EQ(choose_device(config, it_can, load_nothing).driver, nullptr);
}

}  // namespace
}  // namespace terrace
