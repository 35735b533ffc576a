// placement.activations = "auto": which blocks run again is planned from what steps have shown, and never changes bits.

#include "integration/activation_planner.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

constexpr std::uint64_t MiB = 1 << 20;
constexpr int layers = 6;
constexpr std::int64_t elements = MiB / 4;
constexpr std::uint64_t saved_by_a_layer = 4 * MiB;

/// Each layer saves four results of a MiB, quickly.
struct Layers : torch::nn::Module {
  Layers() : weight(register_parameter("weight", torch::full({layers}, 0.5))) {}

  /// Of `count` of them.
  at::Tensor forward(const at::Tensor& input, int count = layers) {
    at::Tensor x = input;
    for (int i = 0; i < count; ++i) {
      const at::Tensor scale = weight[i];
      x = terrace::block(
          [this, scale, i](const at::Tensor& given) {
            ++runs;
            if (torch::autograd::get_current_graph_task_id() != -1) {
              ran_again.push_back(i);
              std::this_thread::sleep_for(again);
            }
            if (needs_scratch) {
              const torch::NoGradGuard no_grad;
              torch::ones({6 * elements}).mul_(2);
            }
            if (!in_statements) return (given * scale).sin().exp().tanh();
            at::Tensor result = given * scale;
            result = result.sin();
            result = result.exp();
            return result.tanh();
          },
          x);
    }
    return x.mean();
  }

  at::Tensor weight;
  bool in_statements = false;  ///< so that each result can leave before the next but one is made
  bool needs_scratch = false;  ///< for a moment, in which nothing is saved
  int runs = 0;
  std::vector<int> ran_again;          ///< which layers did, in backward
  std::chrono::milliseconds again{0};  ///< that a run in backward takes longer
};

Config config(std::uint64_t device_bytes, std::uint64_t link) {
  Config config;
  config.device.kind = "emulated";
  config.device.memory = device_bytes;
  config.device.link = link;
  config.host.memory = 128 * MiB;
  config.log.level = LogLevel::warning;
  return config;
}

struct Outcome {
  std::vector<double> losses;
  at::Tensor weight;
  int runs_of_last_step = 0;
  std::vector<std::vector<int>> ran_again;  ///< in each step
  std::optional<ActivationReport> report;
  std::uint64_t needed_bytes = 0;  ///< on the device
};

struct Program {
  int steps = 9;
  int micro_batches = 1;
  std::chrono::milliseconds again{0};
  bool in_statements = false;
  bool needs_scratch = false;
  bool first_batch_holds = false;  ///< memory of the program's, in backward
  bool second_backward_holds = false;
  std::function<int(int step)> layers_in = [](int) { return layers; };
  std::function<std::int64_t(int step)> elements_in = [](int) { return elements; };
};

Outcome train(const Program& program, const std::optional<Config>& config) {
  at::set_num_threads(1);
  std::optional<Session> session;
  if (config) {
    session.emplace(*config);
  }
  torch::manual_seed(3);
  Layers model;
  model.again = program.again;
  model.in_statements = program.in_statements;
  model.needs_scratch = program.needs_scratch;
  std::unique_ptr<AdamW> optimizer;
  if (session) {
    session->manage(model);
    optimizer = std::make_unique<AdamW>(*session, torch::optim::AdamWOptions(1e-2));
  } else {
    optimizer = std::make_unique<AdamW>(model.parameters(), torch::optim::AdamWOptions(1e-2));
  }
  Outcome outcome;
  for (int step = 0; step < program.steps; ++step) {
    model.runs = 0;
    model.ran_again.clear();
    const at::Tensor input = torch::randn({program.elements_in(step)});
    for (int batch = 0; batch < program.micro_batches; ++batch) {
      const at::Tensor loss = model.forward(input, program.layers_in(step));
      if (program.second_backward_holds) {
        loss.backward({}, /*retain_graph=*/true);
      }
      const bool holds = program.second_backward_holds || (program.first_batch_holds && batch == 0);
      const at::Tensor held = torch::ones({holds ? 5 * elements : 1});
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
    optimizer->step();
    optimizer->zero_grad();
    outcome.runs_of_last_step = model.runs;
    outcome.ran_again.push_back(model.ran_again);
  }
  if (session) {
    outcome.report = session->activation_report();
    outcome.needed_bytes = session->memory_usage().needed(Tier::device);
    const auto view = session->gather({model.weight}, Access::read);
    outcome.weight = model.weight.detach().clone();
  } else {
    outcome.weight = model.weight.detach().clone();
  }
  return outcome;
}

void expect_the_bits_of_unmanaged(const Outcome& outcome, const Program& program) {
  const Outcome expected = train(program, std::nullopt);
  EXPECT_EQ(outcome.losses, expected.losses);
  EXPECT_TRUE(same_bits(outcome.weight, expected.weight));
}

/// The smallest device.memory with which it runs where no block runs again.
std::uint64_t needed_when_all_may_leave(const Program& program) {
  Config roomy = config(64 * MiB, 0);
  roomy.device.link.reset();
  roomy.placement.activations = "host";
  return train(program, roomy).needed_bytes;
}

std::ptrdiff_t count(const ActivationReport& report, BlockActivations which) {
  return std::count(report.blocks.begin(), report.blocks.end(), which);
}

class ActivationPlan : public ::testing::TestWithParam<bool> {};

TEST_P(ActivationPlan, has_quick_blocks_run_again_where_the_link_is_slow) {
  const Program program{.in_statements = GetParam()};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  ASSERT_TRUE(outcome.report);
  const ActivationReport& report = *outcome.report;
  ASSERT_EQ(report.blocks.size(), layers);
  EXPECT_FALSE(report.is_dropped);
  EXPECT_GT(count(report, BlockActivations::recompute), 0);
  EXPECT_EQ(outcome.runs_of_last_step, layers + count(report, BlockActivations::recompute));
  EXPECT_NEAR(static_cast<double>(report.saved_bytes), static_cast<double>(layers * saved_by_a_layer), 0.1 * MiB)
      << "each result once, and what the block reads";
  EXPECT_GT(report.bytes_before, 4 * MiB);
  EXPECT_LT(report.predicted_bytes, report.bytes_before / 2);
  EXPECT_LT(report.measured_bytes.value(), report.bytes_before / 2);
  EXPECT_LT(report.predicted_seconds, report.seconds_before / 2);
  EXPECT_LT(report.measured_seconds.value(), report.seconds_before / 2);
}

INSTANTIATE_TEST_SUITE_P(Results, ActivationPlan, ::testing::Bool(), [](const auto& test) {
  return test.param ? "may_leave_while_a_block_runs" : "are_held_until_a_block_ends";
});

TEST(ActivationPlanner, keeps_all_where_it_fits) {
  const Program program;
  const Outcome outcome = train(program, config(64 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  ASSERT_TRUE(outcome.report);
  EXPECT_EQ(count(*outcome.report, BlockActivations::keep), layers);
  EXPECT_EQ(outcome.report->bytes_before, 0);
  EXPECT_EQ(outcome.report->predicted_bytes, 0);
  EXPECT_EQ(outcome.runs_of_last_step, layers);
}

TEST(ActivationPlanner, drops_a_plan_that_turns_out_slower) {
  const Program program{.steps = 10, .again = std::chrono::milliseconds(400)};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  ASSERT_TRUE(outcome.report);
  EXPECT_GT(count(*outcome.report, BlockActivations::recompute), 0);
  EXPECT_TRUE(outcome.report->is_dropped);
  EXPECT_EQ(outcome.runs_of_last_step, layers);
}

TEST(ActivationPlanner, plans_nothing_that_needs_more_than_the_budget) {
  std::ptrdiff_t ran_again = 0;
  const std::vector<Program> programs{
      {},
      {.in_statements = true},
      {.micro_batches = 2, .in_statements = true, .needs_scratch = true, .first_batch_holds = true},
      {.in_statements = true, .needs_scratch = true, .second_backward_holds = true},
  };
  for (const Program& program : programs) {
    const std::uint64_t smallest = needed_when_all_may_leave(program);
    for (std::uint64_t more = 0; more <= 5 * MiB; more += MiB) {
      const Outcome outcome = train(program, config(smallest + more, 500'000'000));
      expect_the_bits_of_unmanaged(outcome, program);
      ran_again += count(outcome.report.value(), BlockActivations::recompute);
    }
  }
  EXPECT_GT(ran_again, 0);
}

TEST(ActivationPlanner, blocks_whose_saved_tensors_have_no_room_at_once_may_run_again) {
  const Program program{.steps = 3, .in_statements = true};
  Config tight = config(saved_by_a_layer + 2 * MiB, 0);
  tight.device.link.reset();
  tight.placement.activations = "recompute";
  const Outcome outcome = train(program, tight);
  expect_the_bits_of_unmanaged(outcome, program);
  EXPECT_EQ(outcome.runs_of_last_step, 2 * layers);
}

TEST(ActivationPlanner, runs_no_block_again_that_is_given_more_than_was_measured) {
  const Program program{
      .steps = 12, .in_statements = true, .elements_in = [](int step) { return step == 9 ? elements * 2 : elements; }};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  EXPECT_FALSE(outcome.ran_again[8].empty());
  EXPECT_TRUE(outcome.ran_again[9].empty());
  EXPECT_EQ(outcome.ran_again[10], outcome.ran_again[8]);
}

TEST(ActivationPlanner, plans_one_pass_for_all_micro_batches) {
  const Program program{.micro_batches = 3};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  ASSERT_TRUE(outcome.report);
  ASSERT_EQ(outcome.report->blocks.size(), layers);
  EXPECT_EQ(outcome.runs_of_last_step, 3 * (layers + count(*outcome.report, BlockActivations::recompute)));
}

TEST(ActivationPlanner, has_no_plan_for_steps_that_are_not_alike) {
  const Program program{.layers_in = [](int step) { return layers - step % 2; }};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  EXPECT_FALSE(outcome.report);
}

TEST(ActivationPlanner, has_the_same_blocks_run_again_after_a_step_that_has_fewer) {
  const Program program{.steps = 12, .layers_in = [](int step) { return step == 9 ? layers - 1 : layers; }};
  const Outcome outcome = train(program, config(14 * MiB, 50'000'000));
  expect_the_bits_of_unmanaged(outcome, program);
  EXPECT_FALSE(outcome.ran_again[8].empty());
  EXPECT_EQ(outcome.ran_again[10], outcome.ran_again[8]);
  EXPECT_EQ(outcome.ran_again[11], outcome.ran_again[8]);
}

TEST(ActivationPlanner, survives_a_graph_that_outlives_the_step_and_the_session) {
  at::Tensor loss;
  Layers model;
  {
    Session session(config(14 * MiB, 50'000'000));
    session.manage(model);
    AdamW optimizer(session, torch::optim::AdamWOptions(0.0));
    const at::Tensor input = torch::randn({elements});
    for (int step = 0; step < 2; ++step) {
      model.forward(input).backward();
      optimizer.step();
    }
    loss = model.forward(input);  // in the step that is measured
  }
  loss.backward();
  EXPECT_TRUE(model.weight.grad().defined());
}

TEST(ActivationPlanner, is_not_asked_where_the_configuration_says_what_to_do) {
  for (const char* activations : {"keep", "host", "recompute"}) {
    Config fixed = config(64 * MiB, 1'000'000'000);
    fixed.placement.activations = activations;
    EXPECT_FALSE(train(Program{.steps = 5}, fixed).report) << activations;
  }
}

TEST(RecomputedInputs, leave_the_device_where_they_have_no_room) {
  // 24 blocks that each read a MiB, of which the device holds a third.
  constexpr int deep = 24;
  at::set_num_threads(1);
  const auto run = [&](const std::optional<Config>& config) {
    std::optional<Session> session;
    if (config) {
      session.emplace(*config);
    }
    torch::manual_seed(3);
    at::Tensor first = torch::randn({elements}).requires_grad_();
    at::Tensor x = first * 1;
    for (int i = 0; i < deep; ++i) {
      x = terrace::block([](const at::Tensor& given) { return given.sin().cos(); }, x);
    }
    x.sum().backward();
    return first.grad().clone();
  };
  Config fixed = config(9 * MiB, 1'000'000'000);
  fixed.placement.activations = "recompute";
  const at::Tensor expected = run(std::nullopt);
  EXPECT_TRUE(same_bits(run(fixed), expected));
}

}  // namespace
}  // namespace terrace::testing
