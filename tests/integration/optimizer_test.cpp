// What all optimizers do alike: gradient norms, the loss scale, and the type that gradients are summed up in.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

// ---- Gradient norms

TEST(GradientNorms, are_told_by_group_with_a_session_and_without) {
  expect_the_bits_of_unmanaged(
      [](World& world) {
        AdamW::Groups groups;
        groups.emplace_back(Tensors{world.model->layers[1]->weight, world.model->layers[0]->bias});
        groups.emplace_back(Tensors{world.model->layers[2]->weight, world.model->layers[3]->weight});
        const auto optimizer = world.adamw(groups, usual());
        EXPECT_FALSE(optimizer->newest_gradient_norms().has_value());
        Tensors results;
        for (int i = 0; i < 3; ++i) {
          world.train(*optimizer, results);
          if (world.session) world.session->synchronize();
          const GradientNorms norms = optimizer->newest_gradient_norms().value();
          EXPECT_EQ(norms.step, i + 1);
          EXPECT_EQ(norms.all, optimizer->gradient_norm().value());
          EXPECT_NEAR(std::hypot(norms.by_group.at(0), norms.by_group.at(1)), norms.all, 1e-12);
          for (const double norm : norms.by_group) results.push_back(torch::tensor(norm, at::kDouble));
          world.model->zero_grad();
        }
        return results;
      },
      at::kFloat, {.non_finite = "skip"});
}

TEST(GradientNorms, are_read_without_waiting_for_the_update_that_finds_them) {
  Config config = tight();
  config.optimizer.non_finite = "skip";
  World world(&config);
  world.session.reset();
  at::set_num_threads(static_cast<int>(std::max(2u, std::thread::hardware_concurrency())));
  world.session.emplace(config);  // whose updates are run by whoever needs them
  world.model = std::make_shared<Mlp>();
  world.manage();
  const auto optimizer = world.adamw(usual());
  backward(world);
  poison(world);
  optimizer->step();
  EXPECT_FALSE(optimizer->newest_gradient_norms().has_value());
  EXPECT_EQ(optimizer->skipped_steps(), 0);
  world.session->synchronize();
  EXPECT_EQ(optimizer->newest_gradient_norms().value().step, 1);
  EXPECT_EQ(optimizer->skipped_steps(), 1);
}

TEST(GradientNorms, are_measured_and_nothing_is_clipped_where_the_most_is_infinite) {
  const auto train = [](World& world, double most) {
    const auto optimizer = world.adamw(usual());
    optimizer->max_gradient_norm(most);
    Tensors results;
    for (int step = 0; step < 3; ++step) {
      backward(world);
      if (step == 2) poison(world, std::numeric_limits<float>::infinity());
      optimizer->step();
      optimizer->zero_grad();
      const std::optional<double> norm = optimizer->gradient_norm();
      EXPECT_EQ(norm.has_value(), most > 0);
      EXPECT_EQ(std::isfinite(norm.value_or(1)), most == 0 || step < 2);
    }
    add_parameters(world, results);
    return results;
  };
  World unmeasured;
  const Tensors expected = train(unmeasured, 0);
  const Config config = tight();
  for (const Config* session : {static_cast<const Config*>(nullptr), &config}) {
    World world(session);
    const Tensors actual = train(world, std::numeric_limits<double>::infinity());
    expect_same_bits(actual, expected);
  }
}

// ---- The loss scale

TEST(LossScale, of_a_power_of_two_changes_no_bit) {
  const auto train = [](World& world, double scale) {
    const auto optimizer = world.adamw(usual());
    optimizer->loss_scale(scale);
    optimizer->max_gradient_norm(1e-2);
    for (int i = 0; i < 3; ++i) {
      (world.model->forward(batch()) * scale).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    Tensors results{torch::tensor(optimizer->gradient_norm().value(), at::kDouble)};
    add_parameters(world, results);
    return results;
  };
  World unscaled;
  const Tensors expected = train(unscaled, 1);
  const Config config = tight();
  for (const Config* session : {static_cast<const Config*>(nullptr), &config}) {
    World world(session);
    const Tensors actual = train(world, 4096);
    expect_same_bits(actual, expected);
  }
}

TEST(LossScale, that_is_none_is_refused) {
  World world;
  const auto optimizer = world.adamw(usual());
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan(""), 1e-40, 1e40}) {
    expect_logic_error("loss scale", [&] { optimizer->loss_scale(factor); });
  }
}

TEST(Optimizer, a_gradient_that_libtorch_has_negated_lazily_goes_its_way) {
  for (const bool is_managed : {false, true}) {
    const Config config = tight();
    World world(is_managed ? &config : nullptr);
    const auto optimizer = world.adamw(usual().weight_decay(0));
    at::Tensor& bias = world.model->layers[0]->bias;
    const at::Tensor before = bias.detach().clone();
    (bias * 2).sum().backward();
    bias.mutable_grad() = torch::_neg_view(bias.grad());
    optimizer->step();
    EXPECT_TRUE((bias.detach() > before).all().item<bool>()) << (is_managed ? "managed" : "unmanaged");
  }
}

TEST(Optimizer, a_parameter_that_is_a_negated_view_is_refused) {
  at::Tensor parameter = torch::_neg_view(torch::ones(3)).detach().set_requires_grad(true);
  AdamW optimizer({parameter}, usual());
  parameter.sum().backward();
  expect_logic_error("negated view", [&] { optimizer.step(); });
}

TEST(Optimizer, a_learning_rate_whose_first_step_is_beyond_fp32_is_refused) {
  World world;
  expect_logic_error("learning rate", [&] { world.adamw(AdamW::Options(1e38)); });
}

// ---- The type that gradients are summed up in

TEST(AccumulationInFloat32, of_bf16_gradients_is_that_of_libtorch) {
  const auto train = [](World& world) {
    const auto optimizer = world.adamw(usual());
    optimizer->max_gradient_norm(1.0);
    Tensors results;
    for (int step = 0; step < 3; ++step) {
      for (int part = 0; part < 4; ++part) backward(world);
      const at::Tensor& gradient = world.model->layers[1]->weight.grad();
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      results.push_back(gradient.detach().clone());
      optimizer->step();
      optimizer->zero_grad();
    }
    return results;
  };
  expect_the_bits_of_unmanaged(train, at::kBFloat16, {.states = "split", .accumulate = "float32"});
}

TEST(AccumulationInFloat32, of_a_parameter_that_a_graph_uses_twice_is_that_of_libtorch) {
  TrainingOptions options;
  options.type = at::kBFloat16;
  options.steps = 4;
  options.optimizer.accumulate = "float32";
  const TrainingResult expected = train_small_gpt(options);
  Config config;
  config.device.memory = 8 << 20;
  config.host.memory = 16 << 20;
  config.log.level = LogLevel::error;
  config.optimizer.accumulate = "float32";
  const TrainingResult managed = train_small_gpt(options, config);
  EXPECT_EQ(managed.losses, expected.losses);
  EXPECT_EQ(managed.norms, expected.norms);
  options.optimizer.accumulate = "gradient";
  EXPECT_NE(train_small_gpt(options).norms, expected.norms) << "it makes no difference here";
}

TEST(AccumulationInFloat32, takes_over_gradients_that_were_there_before_the_optimizer) {
  World world(nullptr, at::kBFloat16, {.accumulate = "float32"});
  backward(world);
  const auto optimizer = world.adamw(usual());
  backward(world);
  EXPECT_EQ(world.model->layers[0]->weight.grad().scalar_type(), at::kFloat);
}

TEST(AccumulationInFloat32, keeps_what_bf16_rounds_away) {
  for (const char* type : {"gradient", "float32"}) {
    Config config = tight();
    config.optimizer.accumulate = type;
    World world(&config, at::kBFloat16);
    at::Tensor& weight = world.model->layers[0]->weight;
    for (const double part : {1.0, 0x1p-9, 0x1p-9}) (weight.flatten()[0] * part).backward();
    EXPECT_EQ(weight.grad().flatten()[0].item<float>(), type == std::string("float32") ? 1 + 0x1p-8f : 1.0f);
  }
}

TEST(AccumulationInFloat32, is_what_the_session_says_and_not_what_libtorch_was_asked_for) {
  for (const char* type : {"gradient", "float32"}) {
    Config config = tight();
    config.optimizer.accumulate = type;
    Session session(config);
    Mlp model;
    model.to(at::kBFloat16);
    model.layers[1]->bias.set_grad_dtype(at::kFloat);
    if (type == std::string("float32")) {
      EXPECT_NO_THROW(session.manage(model));
      continue;
    }
    try {
      session.manage(model);
      FAIL() << "no error";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'layer1.bias'"));
      EXPECT_THAT(error.what(), HasSubstr("optimizer.accumulate"));
    }
  }
}

TEST(AccumulationInFloat32, of_a_parameter_that_asks_for_another_type_later_is_refused_by_its_next_backward) {
  const Config config = tight();
  World world(&config);
  at::Tensor& bias = world.model->layers[1]->bias;
  backward(world);
  const at::Tensor before = bias.grad().clone();
  bias.set_grad_dtype(at::kBFloat16);
  try {
    backward(world);
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("'layer1.bias' asks for gradients of BFloat16"));
  }
  bias.set_grad_dtype(at::kFloat);
  EXPECT_TRUE(at::equal(bias.grad(), before)) << "what was accumulated is lost";
  EXPECT_NO_THROW(backward(world));
}

TEST(AccumulationInFloat32, holds_from_the_first_step_for_what_joins_later) {
  const auto sums = [](World& world) {
    for (const double part : {1.0, 0x1p-9, 0x1p-9}) (world.model->layers[0]->weight.flatten()[0] * part).backward();
    return world.model->layers[0]->weight.grad().flatten()[0].item<float>();
  };
  for (const bool is_managed : {false, true}) {
    for (const bool is_frozen : {false, true}) {  // or in a group that is added
      Config config = tight();
      config.optimizer.accumulate = "float32";
      World world(nullptr, at::kBFloat16, {.accumulate = "float32"});
      at::Tensor& weight = world.model->layers[0]->weight;
      weight.set_requires_grad(!is_frozen);
      if (is_managed) {
        world.session.emplace(config);
        world.manage();
      }
      AdamW::Groups groups;
      groups.emplace_back(std::vector<at::Tensor>{world.model->layers[1]->weight});
      if (is_frozen) groups.back().params().push_back(weight);
      const auto optimizer = world.adamw(groups, usual());
      backward(world);
      optimizer->step();
      optimizer->zero_grad();
      if (is_frozen) {
        weight.set_requires_grad(true);
      } else {
        weight.mutable_grad().reset();
        optimizer->add_param_group(torch::optim::OptimizerParamGroup({weight}));
      }
      EXPECT_EQ(sums(world), 1 + 0x1p-8f) << (is_managed ? "managed" : "unmanaged") << (is_frozen ? ", unfrozen" : "");
    }
  }
}

TEST(AccumulationInFloat32, refuses_sums_in_bf16_of_what_joined_by_libtorch_s_own_ways) {
  const auto make = [](World& world) {
    AdamW::Groups groups;
    groups.emplace_back(world.model->layers[1]->parameters());
    return world.adamw(groups, usual());
  };
  const auto take_a_step = [](World& world, AdamW& optimizer) {
    for (int part = 0; part < 3; ++part) backward(world);
    optimizer.step();
    optimizer.zero_grad();
  };
  World by_its_own(nullptr, at::kBFloat16, {.accumulate = "float32"});
  const auto expected_optimizer = make(by_its_own);
  expected_optimizer->add_param_group(Group({by_its_own.model->layers[0]->weight}));
  take_a_step(by_its_own, *expected_optimizer);
  Tensors expected;
  add_parameters(by_its_own, expected);
  for (const bool is_group : {false, true}) {
    World world(nullptr, at::kBFloat16, {.accumulate = "float32"});
    at::Tensor& weight = world.model->layers[0]->weight;
    const auto optimizer = make(world);
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const at::Tensor state = generator.get_state();
    if (is_group) {
      static_cast<torch::optim::Optimizer&>(*optimizer).add_param_group(Group({weight}));
    } else {
      optimizer->param_groups()[0].params().push_back(weight);
    }
    Tensors before, after, actual;
    add_parameters(world, before);
    expect_logic_error("shape [60, 60]", [&] { take_a_step(world, *optimizer); });
    expect_logic_error("set_grad_dtype", [&] { optimizer->step(); });
    add_parameters(world, after);
    expect_same_bits(after, before);
    optimizer->zero_grad();
    weight.set_grad_dtype(at::kFloat);
    world.model->zero_grad();
    generator.set_state(state);
    take_a_step(world, *optimizer);
    add_parameters(world, actual);
    expect_same_bits(actual, expected);
  }
}

TEST(AccumulationInFloat32, changes_nothing_for_fp32_parameters) {
  expect_the_bits_of_unmanaged(
      [](World& world) {
        const auto optimizer = world.adamw(usual());
        Tensors results;
        for (int i = 0; i < 2; ++i) world.train(*optimizer, results);
        return results;
      },
      at::kFloat, {.accumulate = "float32"});
}

}  // namespace
}  // namespace terrace::testing
