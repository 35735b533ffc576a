// Programs whose steps are never alike: the bits of unmanaged, within every budget. What that costs is printed.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

constexpr int steps = 24;
constexpr std::int64_t batch = 2;

SmallGptShape shape() {
  SmallGptShape shape;
  shape.width = 128;
  return shape;
}

/// What a program has, and what it draws from; the same with a session and without.
struct World {
  std::vector<std::shared_ptr<SmallGpt>> models;
  std::mt19937 random{5};
  at::Generator tokens = at::make_generator<at::CPUGeneratorImpl>(11);
  std::vector<float> losses;

  /// [batch, length] tokens and those that follow them, mean cross entropy, by the layers for which `is_used`.
  at::Tensor loss_of(SmallGpt& model, std::int64_t length, const std::function<bool()>& is_used) {
    const at::Tensor drawn = torch::randint(shape().vocabulary, {batch, length + 1}, tokens, torch::kLong);
    const at::Tensor logits = logits_of(model, drawn.slice(1, 0, length), is_used);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), drawn.slice(1, 1, length + 1).flatten());
  }
  static at::Tensor logits_of(SmallGpt& model, const at::Tensor& drawn, const std::function<bool()>& is_used) {
    at::Tensor x = model.embedding(drawn) + model.position(torch::arange(drawn.size(1)));
    for (const auto& layer : model.layers) {
      if (is_used()) x = layer->forward(x);
    }
    return torch::linear(model.norm(x), model.embedding->weight);
  }
};

bool always() { return true; }

struct Program {
  const char* name;
  int models;
  at::Tensor (*loss)(World& world, int step);
};

void PrintTo(const Program& program, std::ostream* out) { *out << program.name; }

const Program kPrograms[] = {
    {"steps_that_are_alike", 1,
     [](World& world, int) { return world.loss_of(*world.models[0], shape().sequence, always); }},
    {"layers_skipped_at_random", 1,
     [](World& world, int) {
       return world.loss_of(*world.models[0], shape().sequence, [&] { return world.random() % 3 != 0; });
     }},
    {"models_in_turn", 2,
     [](World& world, int step) {
       return world.loss_of(*world.models[static_cast<std::size_t>(step) % 2], shape().sequence, always);
     }},
    {"changing_lengths", 1,
     [](World& world, int) {
       return world.loss_of(*world.models[0], 1 + static_cast<std::int64_t>(world.random() % 16), always);
     }},
    {"evaluation_and_generation_between_steps", 1,
     [](World& world, int) {
       {
         const at::NoGradGuard no_grad;
         world.losses.push_back(world.loss_of(*world.models[0], shape().sequence, always).item<float>());
         at::Tensor text = torch::zeros({1, 1}, torch::kLong);
         for (int i = 0; i < 6; ++i) {
           const at::Tensor next = World::logits_of(*world.models[0], text, always).slice(1, -1).argmax(-1);
           text = torch::cat({text, next}, 1);
         }
         world.losses.push_back(text.sum().item<float>());
       }
       return world.loss_of(*world.models[0], shape().sequence, always);
     }},
};

struct Outcome {
  std::vector<float> losses;
  std::vector<at::Tensor> parameters;
};

Config config_for(const std::filesystem::path& folder) {
  Config config = Config::parse(
      "[placement]\nparameters={host=0.5, nvme=0.5}\ngradients={nvme=1}\noptimizer={host=0.5, nvme=0.5}\n", "dynamic",
      {"nvme.paths=[\"" + folder.string() + "\"]"});
  config.device.memory = 4 << 20;
  config.device.chunks = 960 << 10;  // of 3 MiB of parameters a model
  config.host.memory = 16 << 20;
  config.nvme.memory = 40 << 20;
  config.placement.chunk = 64 << 10;
  config.log.level = LogLevel::error;
  return config;
}

void expect_kept_budgets(const MemoryUsage& usage) {
  for (const Tier tier : all_tiers) {
    EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
    EXPECT_GT(usage.peak(tier), 0U) << name_of(tier);
  }
}

Outcome train(const Program& program, const std::optional<Config>& config) {
  at::set_num_threads(1);
  torch::manual_seed(7);
  std::optional<Session> session;
  if (config) session.emplace(*config);
  World world;
  for (int i = 0; i < program.models; ++i) {
    const auto build = [] { return std::make_shared<SmallGpt>(shape()); };
    world.models.push_back(session ? session->construct(build) : build());
  }
  const auto options = torch::optim::AdamWOptions(3e-3).weight_decay(0.1);
  std::optional<AdamW> optimizer;
  if (session) {
    for (const auto& model : world.models) session->manage(*model);
    optimizer.emplace(*session, options);
  } else {
    std::vector<at::Tensor> parameters;
    for (const auto& model : world.models) {
      for (const at::Tensor& parameter : model->parameters()) parameters.push_back(parameter);
    }
    optimizer.emplace(parameters, options);
  }
  optimizer->max_gradient_norm(0.5);
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = program.loss(world, step);
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    world.losses.push_back(loss.item<float>());
  }
  if (session) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const MemoryUsage usage = session->memory_usage();
    std::printf("%s: stalled %.0f%% of %.2f s, %.1f transfers to the device a step begun only when awaited\n",
                program.name, 100 * usage.stall_seconds / seconds.count(), seconds.count(),
                static_cast<double>(usage.demand_fetches) / steps);
    expect_kept_budgets(usage);
  }
  optimizer.reset();
  session.reset();
  Outcome outcome{.losses = world.losses, .parameters = {}};
  for (const auto& model : world.models) {
    for (const at::Tensor& parameter : model->parameters()) outcome.parameters.push_back(parameter.detach().clone());
  }
  return outcome;
}

class DynamicPrograms : public ::testing::TestWithParam<Program> {
 protected:
  ~DynamicPrograms() override { at::set_num_threads(threads_before_); }

  const int threads_before_ = at::get_num_threads();
  const TemporaryFolder folder_;
};

TEST_P(DynamicPrograms, keep_the_bits_within_every_budget) {
  const Outcome unmanaged = train(GetParam(), std::nullopt);
  const Outcome managed = train(GetParam(), config_for(folder_.path()));
  EXPECT_EQ(managed.losses, unmanaged.losses);
  ASSERT_EQ(managed.parameters.size(), unmanaged.parameters.size());
  for (std::size_t i = 0; i < managed.parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(managed.parameters[i], unmanaged.parameters[i])) << "parameter " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, DynamicPrograms, ::testing::ValuesIn(kPrograms),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace terrace::testing
