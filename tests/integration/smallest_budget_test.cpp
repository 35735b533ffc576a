// What a run tells of the smallest device.memory holds: with so much the program runs, with less it is refused.

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/session_world.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

namespace nn = torch::nn;

constexpr std::uint64_t granule_bytes = 4096;  // of the emulated device
constexpr std::uint64_t roomy = 64 << 20;
constexpr int steps = 3;

struct ConvolutionNet : nn::Module {
  at::Tensor forward(at::Tensor x) {
    x = torch::relu(norm(first(x)));
    return last(torch::relu(second(x)).flatten(1));
  }
  nn::Conv2d first{register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)))};
  nn::BatchNorm2d norm{register_module("norm", nn::BatchNorm2d(32))};
  nn::Conv2d second{register_module("second", nn::Conv2d(nn::Conv2dOptions(32, 32, 3).stride(2)))};
  nn::Linear last{register_module("last", nn::Linear(32 * 7 * 7, 16))};
};

struct Recurrent : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(std::get<0>(lstm(x))); }
  nn::LSTM lstm{register_module("lstm", nn::LSTM(nn::LSTMOptions(48, 64).num_layers(2)))};
  nn::Linear last{register_module("last", nn::Linear(64, 48))};
};

/// The first layer's weight is the last one's too.
struct Tied : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(torch::tanh(middle(torch::tanh(first(x)))), first->weight);
  }
  nn::Linear first{register_module("first", nn::Linear(64, 64))};
  nn::Linear middle{register_module("middle", nn::Linear(64, 64))};
};

template <class Model>
void train_on(SessionWorld& world, const std::vector<std::int64_t>& input, int micro_batches = 1) {
  const auto model = world.build<Model>();
  const auto optimizer = world.adamw(*model);
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < micro_batches; ++i) model->forward(torch::randn(input)).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
}

void train_gpt(SessionWorld& world, at::ScalarType type, int micro_batches) {
  const auto model = world.make([&] {
    auto made = std::make_shared<SmallGpt>(SmallGptShape{.layers = 2});
    made->to(type);
    return made;
  });
  world.manage(*model);
  const auto optimizer = world.adamw(*model);
  optimizer->max_gradient_norm(0.5);
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < micro_batches; ++i) {
      const at::Tensor tokens = torch::randint(64, {2, 16});
      model->forward(tokens, tokens).backward();
    }
    optimizer->step();
    optimizer->zero_grad();
  }
}

struct Program {
  std::string name;
  std::function<void(SessionWorld&)> train;
  std::string settings;
  bool on_nvme = false;
};

void PrintTo(const Program& program, std::ostream* out) { *out << program.name; }

const std::vector<Program> programs{
    {"gpt", [](SessionWorld& world) { train_gpt(world, at::kFloat, 1); }, ""},
    {"gpt_on_nvme", [](SessionWorld& world) { train_gpt(world, at::kFloat, 1); }, "", true},
    {"gpt_accumulating", [](SessionWorld& world) { train_gpt(world, at::kFloat, 3); }, ""},
    {"gpt_recomputing", [](SessionWorld& world) { train_gpt(world, at::kFloat, 2); },
     "placement.activations = \"recompute\"\n", true},
    {"bf16_gpt_with_master", [](SessionWorld& world) { train_gpt(world, at::kBFloat16, 2); },
     "optimizer.accumulate = \"float32\"\n", true},
    {"gpt_without_prefetch", [](SessionWorld& world) { train_gpt(world, at::kFloat, 1); }, "io.prefetch = 0\n"},
    {"gpt_with_chunks_that_rest_on_the_device", [](SessionWorld& world) { train_gpt(world, at::kFloat, 1); },
     "placement.parameters = { device = 0.5, host = 0.5 }\n"},
    {"gpt_whose_chunks_overflow_to_the_device", [](SessionWorld& world) { train_gpt(world, at::kFloat, 1); },
     "host.memory = \"1MiB\"\n"},
    {"convolutions",
     [](SessionWorld& world) {
       train_on<ConvolutionNet>(world, {4, 3, 16, 16});
     },
     ""},
    {"lstm",
     [](SessionWorld& world) {
       train_on<Recurrent>(world, {8, 4, 48}, 2);
     },
     "", true},
    {"convolutions_whose_activations_rest_on_the_host",
     [](SessionWorld& world) {
       train_on<ConvolutionNet>(world, {8, 3, 16, 16}, 2);
     },
     "placement.activations = \"host\"\n"},
    {"convolutions_whose_activations_rest_on_nvme",
     [](SessionWorld& world) {
       train_on<ConvolutionNet>(world, {8, 3, 16, 16}, 2);
     },
     "placement.activations = \"nvme\"\n", true},
    {"lstm_whose_activations_rest_on_the_host",
     [](SessionWorld& world) {
       train_on<Recurrent>(world, {64, 16, 48}, 2);
     },
     "placement.activations = \"host\"\n"},
    {"tied_weights",
     [](SessionWorld& world) {
       train_on<Tied>(world, {16, 64}, 2);
     },
     ""},
};

class SmallestBudget : public ::testing::TestWithParam<Program> {
 protected:
  /// What was used, or nothing where it was refused for want of memory.
  std::optional<MemoryUsage> run(std::uint64_t device_bytes) const {
    const TemporaryFolder folder;
    std::string text = "placement.chunk = \"16KiB\"\nlog.level = \"off\"\n" + GetParam().settings;
    if (GetParam().on_nvme) {
      text += "nvme.paths = [\"" + (folder.path() / "nvme").string() + "\"]\nnvme.memory = \"64MiB\"\n" +
              "placement.parameters = { nvme = 1.0 }\nplacement.gradients = { host = 0.5, nvme = 0.5 }\n"
              "placement.optimizer = { nvme = 1.0 }\n";
    }
    Config config = Config::parse(text);
    config.device.memory = device_bytes;
    config.host.memory = config.host.memory.value_or(roomy);
    std::optional<SessionWorld> world;
    try {
      world.emplace(&config);
      GetParam().train(*world);
      world->session->synchronize();
      return world->session->memory_usage();
    } catch (const OutOfMemory&) {
      return std::nullopt;
    } catch (const c10::Error& error) {
      EXPECT_TRUE(last_error_as<OutOfMemory>(*world->session)) << error.what();
      return std::nullopt;
    }
  }

  static std::uint64_t needed(const std::optional<MemoryUsage>& usage) {
    return usage ? usage->needed(Tier::device) : 0;
  }
};

TEST_P(SmallestBudget, runs_with_the_smallest_device_memory_that_was_reported) {
  const std::uint64_t told = needed(run(roomy));
  ASSERT_GT(told, 0u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(needed(run(told)), told) << "and tells the same again";
  }
}

TEST_P(SmallestBudget, one_granule_less_is_refused_with_out_of_memory) {
  const std::uint64_t told = needed(run(roomy));
  ASSERT_GT(told, granule_bytes);
  EXPECT_FALSE(run(told - granule_bytes));
  EXPECT_FALSE(run(told - 1));
}

INSTANTIATE_TEST_SUITE_P(Of, SmallestBudget, ::testing::ValuesIn(programs),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace terrace::testing
