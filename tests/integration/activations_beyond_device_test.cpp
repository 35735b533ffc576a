// A GPT whose activations alone are five times the device, with each way to treat them.

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

constexpr std::uint64_t MiB = 1 << 20;
constexpr std::uint64_t device_bytes = 28 * MiB;
constexpr int steps = 6;  // a plan is made in the third

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
};

/// 1,280 tokens through 16 layers of 128 channels: 12 MiB of parameters.
Outcome train(Session* session) {
  torch::manual_seed(11);
  const auto model = std::make_shared<SmallGpt>(SmallGptShape{.width = 128, .layers = 16, .sequence = 64});
  const at::Tensor tokens = torch::randint(64, {20, 65});
  std::unique_ptr<AdamW> optimizer;
  if (session != nullptr) {
    session->manage(*model);
    optimizer = std::make_unique<AdamW>(*session, torch::optim::AdamWOptions(1e-3));
  } else {
    optimizer = std::make_unique<AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  }
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = model->forward(tokens.slice(1, 0, 64), tokens.slice(1, 1, 65));
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    outcome.losses.push_back(loss.item<double>());
  }
  const auto keep = [&](const at::Tensor& parameter) {
    const auto* const values = parameter.const_data_ptr<float>();
    outcome.parameters.emplace_back(values, values + parameter.numel());  // not on the device
  };
  if (session != nullptr) {
    session->for_each_parameter([&](const std::string&, at::Tensor& parameter) { keep(parameter); });
  } else {
    for (const at::Tensor& parameter : model->parameters()) {
      keep(parameter);
    }
  }
  return outcome;
}

class ActivationsBeyondDevice : public ::testing::TestWithParam<std::string> {
 protected:
  Config config(const std::string& activations, std::uint64_t device_memory) const {
    Config config;
    config.device.kind = "emulated";
    config.device.memory = device_memory;
    config.host.memory = (activations == "nvme" ? 24 : activations == "auto" ? 64 : 256) * MiB;
    config.nvme.paths = {folder_.path()};
    config.nvme.memory = 512 * MiB;
    config.placement.chunk = MiB / 2;
    config.placement.activations = activations;
    if (activations == "auto") {
      config.device.link = 400'000'000;  // so slow that some blocks run again
    }
    return config;
  }

 private:
  TemporaryFolder folder_;
};

TEST_P(ActivationsBeyondDevice, of_a_gpt_give_the_bits_of_unmanaged_within_every_budget) {
  const Outcome expected = train(nullptr);
  {
    Session roomy(config("keep", 512 * MiB));
    train(&roomy);
    ASSERT_GE(roomy.memory_usage().peak(Tier::device, Kind::other), 5 * device_bytes) << "of all activations";
  }
  Session session(config(GetParam(), device_bytes));
  const Outcome managed = train(&session);
  EXPECT_EQ(managed.losses, expected.losses);
  EXPECT_TRUE(managed.parameters == expected.parameters);
  const MemoryUsage usage = session.memory_usage();
  for (const Tier tier : all_tiers) {
    EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
  }
  if (GetParam() == "auto") {
    ASSERT_TRUE(session.activation_report());
    EXPECT_GE(session.activation_report()->saved_bytes, 5 * device_bytes);
    EXPECT_THAT(session.activation_report()->blocks, ::testing::Contains(BlockActivations::recompute));
  }
}

INSTANTIATE_TEST_SUITE_P(Treated, ActivationsBeyondDevice, ::testing::Values("recompute", "host", "nvme", "auto"),
                         [](const auto& way) { return way.param; });

}  // namespace
}  // namespace terrace::testing
