// Micro-batches that go through a model layer by layer: the bits of the ordinary loop, and a fraction of what crosses
// the link.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

constexpr std::uint64_t MiB = 1 << 20;
constexpr int batches = 8;
constexpr int steps = 4;

struct Sizes {
  int depth = 0;
  std::int64_t rows = 0;   ///< of a micro-batch
  std::int64_t width = 0;  ///< of a layer, which is square
};

torch::nn::ModuleList make_layers(const Sizes& sizes) {
  torch::nn::ModuleList layers;
  for (int i = 0; i < sizes.depth; ++i) {
    const torch::nn::Linear layer(torch::nn::LinearOptions(sizes.width, sizes.width).bias(false));
    // So that neither activations nor gradients vanish on the way through many of them.
    torch::nn::init::xavier_normal_(layer->weight, torch::nn::init::calculate_gain(torch::kTanh));
    layers->push_back(layer);
  }
  return layers;
}

at::Tensor apply(const std::shared_ptr<torch::nn::Module>& layer, const at::Tensor& x) {
  return at::tanh(layer->as<torch::nn::Linear>()->forward(x));
}

at::Tensor loss_of(const at::Tensor& x) { return x.square().mean() / batches; }

Tensors ordinary(torch::nn::ModuleList& layers, const Tensors& inputs) {
  Tensors losses;
  for (at::Tensor x : inputs) {
    for (const auto& layer : *layers) {
      x = block([layer](const at::Tensor& in) { return apply(layer, in); }, x);
    }
    losses.push_back(loss_of(x));
    losses.back().backward();
  }
  return losses;
}

Tensors by_layers(torch::nn::ModuleList& layers, Tensors x) {
  for (const auto& layer : *layers) {
    x = layer_major([layer](const at::Tensor& in) { return apply(layer, in); }, std::move(x));
  }
  const Tensors losses = layer_major(&loss_of, std::move(x));
  torch::autograd::backward(losses);
  return losses;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
  std::uint64_t host_to_device = 0;  ///< in the last step
  std::uint64_t device_to_host = 0;
};

using Pass = std::function<Tensors(torch::nn::ModuleList&, Tensors)>;

Outcome train(const Pass& pass, const Sizes& sizes, const std::optional<Config>& config = std::nullopt) {
  torch::manual_seed(5);
  torch::nn::ModuleList layers = make_layers(sizes);
  Tensors inputs;
  for (int i = 0; i < batches; ++i) {
    inputs.push_back(torch::randn({sizes.rows, sizes.width}));
  }
  std::optional<Session> session;
  std::optional<AdamW> optimizer;
  if (config) {
    session.emplace(*config);
    session->manage(*layers);
    optimizer.emplace(*session, torch::optim::AdamWOptions(1e-2));
  } else {
    optimizer.emplace(layers->parameters(), torch::optim::AdamWOptions(1e-2));
  }
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    for (const at::Tensor& loss : pass(layers, inputs)) {
      outcome.losses.push_back(loss.item<double>());
    }
    optimizer->step();
    optimizer->zero_grad();
    if (session && step + 2 == steps) {
      outcome.host_to_device = session->memory_usage().moved(Link::host_to_device);
      outcome.device_to_host = session->memory_usage().moved(Link::device_to_host);
    }
  }
  if (session) {
    outcome.host_to_device = session->memory_usage().moved(Link::host_to_device) - outcome.host_to_device;
    outcome.device_to_host = session->memory_usage().moved(Link::device_to_host) - outcome.device_to_host;
  }
  const auto keep = [&](const at::Tensor& parameter) {
    const auto* const values = parameter.const_data_ptr<float>();
    outcome.parameters.emplace_back(values, values + parameter.numel());  // not on the device
  };
  if (session) {
    session->for_each_parameter([&](const std::string&, at::Tensor& parameter) { keep(parameter); });
  } else {
    for (const at::Tensor& parameter : layers->parameters()) {
      keep(parameter);
    }
  }
  return outcome;
}

Config tight(const std::string& activations, std::uint64_t device_bytes, std::uint64_t chunk_bytes) {
  Config config;
  config.device.kind = "emulated";
  config.device.memory = device_bytes;
  config.host.memory = 256 * MiB;
  config.placement.chunk = chunk_bytes;
  config.placement.activations = activations;
  return config;
}

void expect_same(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_TRUE(actual.parameters == expected.parameters);
}

class LayerMajor : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Activations, LayerMajor, ::testing::Values("keep", "host", "recompute"),
                         [](const auto& test) { return std::string(test.param); });

// Activations of 128 KiB a layer and micro-batch: 4 MiB in the loop, and 32 MiB by layers, where all are kept.
constexpr Sizes wide_activations{.depth = 32, .rows = 128, .width = 256};

TEST(LayerMajorAlone, has_the_bits_of_the_ordinary_loop_without_a_session) {
  expect_same(train(&by_layers, wide_activations), train(&ordinary, wide_activations));
}

TEST_P(LayerMajor, has_the_bits_of_the_ordinary_loop_within_a_budget) {
  const Outcome plain = train(&ordinary, wide_activations);
  // A recomputed block keeps its input.
  const std::uint64_t device_bytes = std::string(GetParam()) == "host" ? 6 * MiB : 40 * MiB;
  expect_same(train(&by_layers, wide_activations, tight(GetParam(), device_bytes, MiB / 4)), plain);
}

TEST(LayerMajorWithinABudget, moves_a_sixth_of_the_loops_bytes) {
  // 16 MiB of parameters, and 4 MiB of activations by layers.
  constexpr Sizes wide_layers{.depth = 16, .rows = 16, .width = 512};
  const Config config = tight("keep", 9 * MiB, MiB);
  const Outcome loop = train(&ordinary, wide_layers, config);
  const Outcome layers = train(&by_layers, wide_layers, config);
  expect_same(layers, loop);
  EXPECT_LE(6 * layers.host_to_device, loop.host_to_device);
  EXPECT_LE(6 * layers.device_to_host, loop.device_to_host);
}

TEST(LayerMajorInputs, of_different_counts_of_micro_batches_are_an_error) {
  const Tensors three(3, torch::ones({2}));
  const Tensors two(2, torch::ones({2}));
  try {
    layer_major([](const at::Tensor& x, const at::Tensor& y) { return x + y; }, three, two);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const LogicError& error) {
    EXPECT_THAT(error.what(), HasSubstr("inputs of 3 and of 2 micro-batches"));
  }
}

TEST(LayerMajorInputs, of_no_micro_batch_give_no_results) {
  EXPECT_TRUE(layer_major([](const at::Tensor& x) { return x; }, Tensors()).empty());
}

TEST(LayerMajorInputs, are_let_go_of_once_they_were_used) {
  Tensors inputs{torch::ones({2}), torch::ones({2})};
  const c10::weak_intrusive_ptr<c10::TensorImpl> second(inputs[1].getIntrusivePtr());
  int calls = 0;
  layer_major(
      [&](const at::Tensor& x) {
        if (++calls == 2) {
          EXPECT_TRUE(second.expired());
        }
        return x + 1;
      },
      std::move(inputs));
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace terrace::testing
