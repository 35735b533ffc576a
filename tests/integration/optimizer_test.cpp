// What all optimizers do alike: gradients that are not finite, the loss scale, updates within backward, the type that
// gradients are summed up in, and another optimizer than AdamW.

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

void poison(World& world, float value = std::numeric_limits<float>::quiet_NaN()) {
  const torch::NoGradGuard no_grad;
  world.model->layers[3]->weight.mutable_grad()[2][5] = value;
}

void backward(World& world) { world.model->forward(batch(world.model->layers[0]->weight.scalar_type())).backward(); }

}  // namespace

// ---- Gradients that are not finite

TEST(NonFiniteGradients, that_are_skipped_leave_training_as_if_the_step_had_not_been) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const auto train = [&](World& world, bool with_bad_steps) {
        const auto optimizer = world.adamw(usual());
        optimizer->max_gradient_norm(1.0);
        Tensors results;
        for (int step = 0; step < 5; ++step) {
          if (with_bad_steps && step != 2) {  // also the first, before there are states
            auto generator = at::globalContext().defaultGenerator(at::kCPU);
            const at::Tensor state = generator.get_state();
            backward(world);
            poison(world, value);
            optimizer->step();
            optimizer->zero_grad();
            generator.set_state(state);
          }
          world.train(*optimizer, results);
        }
        EXPECT_EQ(optimizer->skipped_steps(), with_bad_steps ? 4 : 0);
        add_parameters(world, results);
        return results;
      };
      World plain(nullptr, type);
      const Tensors expected = train(plain, false);
      const TemporaryFolder folder;
      for (Config config : {tight(), tight_on_nvme(folder, host_chunks)}) {
        config.optimizer.non_finite = "skip";
        World managed(&config, type);
        const Tensors actual = train(managed, true);
        ASSERT_EQ(actual.size(), expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i << " of " << expected.size();
        }
      }
      World unmanaged(nullptr, type, {.non_finite = "skip"});
      const Tensors actual = train(unmanaged, true);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i << " of " << expected.size();
      }
    }
  }
}

TEST(NonFiniteGradients, are_told_of_by_the_next_step_which_is_not_taken_and_training_may_go_on) {
  Config config = tight();
  config.optimizer.non_finite = "error";
  World world(&config);
  const auto optimizer = world.adamw(usual());
  Tensors before, after;
  add_parameters(world, before);
  backward(world);
  poison(world);
  optimizer->step();
  try {
    optimizer->step();
    FAIL() << "no error";
  } catch (const NonFiniteGradient& error) {
    EXPECT_THAT(error.what(), HasSubstr("'layer3.weight'"));
    EXPECT_THAT(error.what(), HasSubstr("step 1"));
  }
  add_parameters(world, after);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << i;
  EXPECT_EQ(optimizer->skipped_steps(), 1);
  optimizer->zero_grad();
  backward(world);
  optimizer->step();
  world.session->synchronize();
  EXPECT_FALSE(same_bits(world.model->layers[3]->weight.detach().clone(), before[6]));
}

TEST(NonFiniteGradients, are_told_of_by_whatever_waits_for_the_update) {
  const TemporaryFolder folder;
  Config config = tight();
  config.optimizer.non_finite = "error";
  World world(&config);
  const auto optimizer = world.adamw(usual());
  const auto expect_told_by = [&](const auto& call) {
    backward(world);
    poison(world);
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_THROW(call(), NonFiniteGradient);
    EXPECT_NO_THROW(call()) << "once";
  };
  expect_told_by([&] { world.session->synchronize(); });
  expect_told_by([&] { world.session->save(folder.path() / "checkpoint"); });
  expect_told_by([&] { const Gathered view = world.session->gather({world.model->layers[0]->weight}, Access::read); });
}

TEST(NonFiniteGradients, are_told_of_by_the_step_itself_where_updates_are_immediate) {
  Config config = tight();
  config.optimizer.non_finite = "error";
  config.optimizer.update = "immediate";
  World world(&config);
  const auto optimizer = world.adamw(usual());
  backward(world);
  poison(world);
  EXPECT_THROW(optimizer->step(), NonFiniteGradient);
  optimizer->zero_grad();
  backward(world);
  EXPECT_NO_THROW(optimizer->step());
}

TEST(NonFiniteGradients, without_a_session_throw_at_once_and_change_nothing) {
  World world(nullptr, at::kFloat, {.non_finite = "error"});
  const auto optimizer = world.adamw(usual());
  Tensors before, after;
  add_parameters(world, before);
  backward(world);
  poison(world);
  try {
    optimizer->step();
    FAIL() << "no error";
  } catch (const NonFiniteGradient& error) {
    EXPECT_THAT(error.what(), HasSubstr("parameter 6 of group 0"));
  }
  add_parameters(world, after);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << i;
}

TEST(NonFiniteGradients, that_nobody_asks_about_do_not_keep_the_model_from_ending_well) {
  Config config = tight();
  config.optimizer.non_finite = "error";
  World world(&config);
  auto optimizer = world.adamw(usual());
  backward(world);
  poison(world);
  optimizer->step();
  optimizer.reset();
  world.session.reset();
  EXPECT_NO_THROW(world.model->layers[0]->weight.detach().clone().sum().item<float>());
}

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
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(actual[i], expected[i])) << i;
  }
}

TEST(LossScale, that_is_none_is_refused) {
  World world;
  const auto optimizer = world.adamw(usual());
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan(""), 1e-40, 1e40}) {
    expect_logic_error("loss scale", [&] { optimizer->loss_scale(factor); });
  }
}

// ---- Updates within backward

TEST(UpdateInBackward, gives_the_bits_of_updates_after_it) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const auto train = [&](World& world, bool in_backward) {
      const auto optimizer = world.adamw(usual());
      optimizer->update_in_backward(in_backward);
      world.model->layers[2]->bias.set_requires_grad(false);  // its chunk is complete without it
      Tensors results;
      for (int i = 0; i < 5; ++i) {
        for (auto& group : optimizer->param_groups()) group.options().set_lr(1e-2 / (i + 1));
        if (i == 3) {  // one layer takes no part: its chunk is never complete
          at::Tensor x = batch(type);
          for (std::size_t layer = 0; layer < 5; ++layer) x = torch::tanh(world.model->layers[layer](x));
          x.pow(2).mean().backward();
          optimizer->step();
          optimizer->zero_grad();
        } else {
          world.train(*optimizer, results);
        }
      }
      add_parameters(world, results);
      return results;
    };
    World plain(nullptr, type);
    const Tensors expected = train(plain, false);
    const TemporaryFolder folder;
    for (const Config& config : {tight(), tight_on_nvme(folder, host_chunks)}) {
      World managed(&config, type);
      const Tensors actual = train(managed, true);
      EXPECT_EQ(managed.session->last_error(), nullptr);
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i << " of " << expected.size();
      }
    }
  }
}

TEST(UpdateInBackward, leaves_no_gradient_behind) {
  for (const bool in_backward : {false, true}) {
    const Config config = tight();
    World world(&config);
    const auto optimizer = world.adamw(usual());
    optimizer->update_in_backward(in_backward);
    backward(world);
    for (const at::Tensor& parameter : world.model->parameters()) {
      EXPECT_EQ(parameter.grad().defined(), !in_backward);
    }
  }
}

TEST(UpdateInBackward, refuses_what_needs_all_gradients_first) {
  Config config = tight();
  {
    World world(&config);
    const auto optimizer = world.adamw(usual());
    optimizer->max_gradient_norm(1.0);
    expect_logic_error("max_gradient_norm", [&] { optimizer->update_in_backward(true); });
    optimizer->max_gradient_norm(0);
    optimizer->update_in_backward(true);
    expect_logic_error("update_in_backward", [&] { optimizer->max_gradient_norm(1.0); });
    optimizer->update_in_backward(false);
    EXPECT_NO_THROW(optimizer->max_gradient_norm(1.0));
  }
  config.optimizer.non_finite = "skip";
  {
    World world(&config);
    const auto optimizer = world.adamw(usual());
    expect_logic_error("optimizer.non_finite", [&] { optimizer->update_in_backward(true); });
  }
  World world;
  const auto optimizer = world.adamw(usual());
  expect_logic_error("session", [&] { optimizer->update_in_backward(true); });
}

TEST(UpdateInBackward, refuses_a_second_backward_before_the_step_by_the_parameter_s_name) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->update_in_backward(true);
  backward(world);
  expect_logic_error("'layer5.", [&] { backward(world); });
  optimizer->step();
  optimizer->zero_grad();
  EXPECT_NO_THROW(backward(world));
}

TEST(UpdateInBackward, takes_in_what_the_program_has_replaced_before_it_updates) {
  const auto train = [](World& world, bool in_backward) {
    const auto optimizer = world.adamw(usual());
    optimizer->update_in_backward(in_backward);
    Tensors results;
    for (int i = 0; i < 4; ++i) {
      if (i == 2) world.model->layers[1]->weight.set_data(torch::full({width, width}, 0.01));
      world.train(*optimizer, results);
    }
    add_parameters(world, results);
    return results;
  };
  World plain;
  const Tensors expected = train(plain, false);
  const Config config = tight();
  World managed(&config);
  const Tensors actual = train(managed, true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(actual[i], expected[i])) << i;
}

TEST(UpdateInBackward, goes_on_after_a_backward_that_failed_and_a_step) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->update_in_backward(true);
  bool fails = true;
  world.model->layers[5]->weight.register_hook([&fails](const at::Tensor& gradient) {
    if (std::exchange(fails, false)) throw std::runtime_error("a hook of the program's");
    return gradient;
  });
  EXPECT_ANY_THROW(backward(world));
  optimizer->zero_grad();
  EXPECT_NO_THROW(backward(world)) << "nothing was used up";
  optimizer->step();
  world.session->synchronize();
}

TEST(UpdateInBackward, of_parameters_that_came_under_management_after_the_optimizer_was_made) {
  const Config config = tight();
  at::set_num_threads(1);
  Session session(config);
  Mlp model;
  AdamW optimizer(session, AdamW::Groups{torch::optim::OptimizerParamGroup(model.parameters())}, usual());
  session.manage(model);
  optimizer.update_in_backward(true);
  model.forward(batch()).backward();
  EXPECT_FALSE(model.layers[0]->weight.grad().defined());
  optimizer.step();
  session.synchronize();
}

TEST(UpdateInBackward, leaves_no_gradient_in_a_chunk_with_a_frozen_parameter) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->update_in_backward(true);
  world.model->layers[2]->bias.set_requires_grad(false);
  backward(world);
  EXPECT_FALSE(world.model->layers[2]->weight.grad().defined());
}

TEST(UpdateInBackward, by_two_optimizers_of_one_parameter_is_refused_by_its_name) {
  const Config config = tight();
  World world(&config);
  const auto first = world.adamw(usual());
  const auto second = world.adamw(usual());
  first->update_in_backward(true);
  expect_logic_error("'layer0.weight'", [&] { second->update_in_backward(true); });
}

TEST(UpdateInBackward, that_was_refused_updates_nothing) {
  const Config config = tight();
  World world(&config);
  AdamW first(*world.session, AdamW::Groups{torch::optim::OptimizerParamGroup({world.model->layers.back()->weight})},
              usual());
  first.update_in_backward(true);
  const auto second = world.adamw(usual());
  expect_logic_error("another optimizer", [&] { second->update_in_backward(true); });
  EXPECT_NO_THROW(backward(world));
  EXPECT_TRUE(world.model->layers[0]->weight.grad().defined());
}

TEST(UpdateInBackward, ends_with_its_optimizer) {
  const Config config = tight();
  World world(&config);
  auto optimizer = world.adamw(usual());
  optimizer->update_in_backward(true);
  backward(world);
  optimizer.reset();
  backward(world);
  EXPECT_TRUE(world.model->layers[0]->weight.grad().defined());
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

// ---- Another optimizer

TEST(Sgd, takes_each_step_of_torch_bit_for_bit) {
  using Options = SGD::Options;
  for (const Options& options :
       {Options(1e-2), Options(1e-2).momentum(0.9), Options(1e-2).momentum(0.9).dampening(0.1).weight_decay(0.01),
        Options(1e-2).momentum(0.9).nesterov(true).weight_decay(0.01)}) {
    at::set_num_threads(1);
    torch::manual_seed(3);
    const at::Tensor ours = torch::randn({4096}).requires_grad_(true);
    const at::Tensor theirs = ours.detach().clone().requires_grad_(true);
    SGD terrace(Tensors{ours}, options);
    torch::optim::SGD torch({theirs}, options);
    for (int step = 0; step < 4; ++step) {
      ours.mutable_grad() = torch::randn({4096});
      theirs.mutable_grad() = ours.grad().clone();
      terrace.step();
      torch.step();
      EXPECT_TRUE(same_bits(ours.detach(), theirs.detach())) << "step " << step;
    }
  }
}

TEST(Sgd, trains_a_managed_model_as_an_unmanaged_one_without_a_variance) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const char* states : {"float32", "split_bfloat16"}) {
      expect_the_bits_of_unmanaged(
          [](World& world) {
            const auto optimizer = world.make<SGD>(SGD::Options(1e-1).momentum(0.9).weight_decay(0.01));
            optimizer->max_gradient_norm(1.0);
            Tensors results;
            for (int i = 0; i < 4; ++i) world.train(*optimizer, results);
            if (world.session) {
              EXPECT_EQ(world.session->memory_usage().peak(Tier::host, Kind::variance), 0u);
            }
            return results;
          },
          type, {.states = states});
    }
  }
}

TEST(Sgd, refuses_options_out_of_range_and_those_of_another_optimizer) {
  using Options = SGD::Options;
  World world;
  const Tensors parameters = world.model->parameters();
  expect_logic_error("SGD: the learning rate", [&] { SGD(parameters, Options(-1)); });
  expect_logic_error("SGD: the momentum", [&] { SGD(parameters, Options(1).momentum(-1)); });
  expect_logic_error("SGD: the weight decay", [&] { SGD(parameters, Options(1).weight_decay(-1)); });
  const double infinity = std::numeric_limits<double>::infinity();
  expect_logic_error("SGD: the dampening", [&] { SGD(parameters, Options(1).momentum(0.9).dampening(infinity)); });
  expect_logic_error("SGD: the learning rate", [&] { SGD(parameters, Options(1e39)); });
  expect_logic_error("Nesterov", [&] { SGD(parameters, Options(1).nesterov(true)); });
  SGD::Groups groups;
  groups.emplace_back(parameters, std::make_unique<AdamW::Options>(1e-3));
  expect_logic_error("another optimizer's", [&] { SGD(groups, Options(1)); });
}

TEST(Sgd, goes_on_after_a_checkpoint_and_adamw_does_not_with_its_states) {
  const TemporaryFolder folder;
  const Config config = tight();
  const auto options = SGD::Options(1e-1).momentum(0.9);
  Tensors expected;
  {
    World world(&config);
    const auto optimizer = world.make<SGD>(options);
    Tensors results;
    world.train(*optimizer, results);
    world.session->save(folder.path() / "checkpoint");
    world.train(*optimizer, expected);
    world.train(*optimizer, expected);
    add_parameters(world, expected);
  }
  World world(&config);
  world.session->load(folder.path() / "checkpoint");
  {
    const auto adamw = world.adamw(usual());
    backward(world);
    expect_logic_error("are those of SGD", [&] { adamw->step(); });
    world.model->zero_grad();
  }
  world.session->load(folder.path() / "checkpoint");
  const auto optimizer = world.make<SGD>(options);
  Tensors actual;
  world.train(*optimizer, actual);
  world.train(*optimizer, actual);
  add_parameters(world, actual);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(actual[i], expected[i])) << i;
}

TEST(Sgd, works_beside_adamw_over_other_parameters) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto half = [&](std::size_t first) {
      Tensors parameters;
      for (std::size_t i = first; i < first + 3; ++i) parameters.push_back(world.model->layers[i]->weight);
      return AdamW::Groups{torch::optim::OptimizerParamGroup(parameters)};
    };
    const auto adamw = world.adamw(half(0), usual());
    const auto options = SGD::Options(1e-1).momentum(0.9);
    const auto sgd = world.session ? std::make_unique<SGD>(*world.session, half(3), options)
                                   : std::make_unique<SGD>(half(3), options);
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor loss = world.model->forward(batch());
      loss.backward();
      adamw->step();
      sgd->step();
      world.model->zero_grad();
      results.push_back(loss.detach().clone());
    }
    return results;
  });
}

}  // namespace terrace::testing
