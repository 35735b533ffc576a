// AdamW is torch::optim::AdamW to a program, over managed and over ordinary tensors, with the same bits.

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

double unit_in_the_last_place(float value) {
  const float magnitude = std::fabs(value);
  return static_cast<double>(std::nextafter(magnitude, std::numeric_limits<float>::infinity())) - magnitude;
}

}  // namespace

TEST(AdamW, takes_each_step_of_torch_within_four_units_in_the_last_place) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  const AdamW::Options options = AdamW::Options(3e-3).weight_decay(0.05).betas({0.8, 0.95}).eps(1e-7);
  at::Tensor ours = torch::randn({200, 51}).requires_grad_();
  at::Tensor theirs = ours.detach().clone().requires_grad_();
  AdamW our_optimizer({ours}, options);
  torch::optim::AdamW their_optimizer({theirs}, options);
  int exact = 0;
  for (int step = 0; step < 20; ++step) {
    {
      const torch::NoGradGuard no_grad;
      ours.copy_(theirs);  // the moments are equal bit for bit; the parameters start equal too
    }
    const at::Tensor old = theirs.detach().clone();
    const at::Tensor gradient = torch::randn({200, 51}) * std::pow(10.0, step % 5 - 2);
    ours.mutable_grad() = gradient.clone();
    theirs.mutable_grad() = gradient.clone();
    our_optimizer.step();
    their_optimizer.step();
    const float* from = old.const_data_ptr<float>();
    const float* expected = theirs.const_data_ptr<float>();
    const float* actual = ours.const_data_ptr<float>();
    for (std::int64_t i = 0; i < old.numel(); ++i) {
      const float largest = std::max({std::fabs(from[i]), std::fabs(expected[i]), std::fabs(expected[i] - from[i])});
      ASSERT_LE(std::fabs(static_cast<double>(actual[i]) - expected[i]), 4 * unit_in_the_last_place(largest))
          << "element " << i << " of step " << step;
      exact += actual[i] == expected[i] ? 1 : 0;
    }
  }
  EXPECT_GT(exact, 20 * 200 * 51 * 98 / 100);
}

TEST(AdamW, trains_a_managed_model_as_torch_does) {
  const AdamW::Options options = usual();
  World theirs;
  torch::optim::AdamW their_optimizer(theirs.model->parameters(), options);
  Tensors their_losses;
  const Config config = tight();
  Tensors our_losses, ours;
  {
    World world(&config);
    const auto optimizer = world.adamw(options);
    for (int i = 0; i < 10; ++i) {
      world.train(*optimizer, our_losses);
    }
    add_parameters(world, ours);
  }
  torch::manual_seed(5);
  World again;  // draws what the managed model drew
  torch::optim::AdamW optimizer(again.model->parameters(), options);
  for (int i = 0; i < 10; ++i) {
    again.train(optimizer, their_losses);
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_NEAR(our_losses[i].item<double>(), their_losses[i].item<double>(), 1e-6) << "step " << i;
  }
  // Rounding differs by units in the last place (6e-8 of 1); a tenth of one step's 1e-2 would be a wrong formula.
  const auto expected = again.model->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT((ours[i] - expected[i].detach()).abs().max().item<double>(), 1e-5) << "parameter " << i;
  }
}

TEST(AdamW, with_groups_of_different_settings_inside_one_chunk) {
  expect_the_bits_of_unmanaged([](World& world) {
    AdamW::Groups groups;
    for (int i = 0; i < 3; ++i) {
      groups.emplace_back(Tensors{},
                          std::make_unique<AdamW::Options>(
                              AdamW::Options(3e-3 * (i + 1)).weight_decay(0.1 * i).betas({0.9 - 0.1 * i, 0.99})));
    }
    int next = 0;
    for (const at::Tensor& parameter : world.model->parameters()) {
      groups[next++ % 3].params().push_back(parameter);  // weight and bias of a chunk fall into different ones
    }
    const auto optimizer = world.adamw(groups, usual());
    optimizer->max_gradient_norm(1e-3);
    Tensors results;
    for (int i = 0; i < 4; ++i) {
      world.train(*optimizer, results);
      EXPECT_GT(optimizer->gradient_norm().value_or(0), 1e-3);
      results.push_back(torch::tensor(optimizer->gradient_norm().value_or(0), torch::kDouble));
    }
    return results;
  });
}

TEST(AdamW, leaves_managed_parameters_outside_its_groups_alone) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto& layers = world.model->layers;
    AdamW::Groups first{Group({layers[0]->weight, layers[2]->weight, layers[3]->bias})};
    AdamW::Groups second{Group({layers[0]->bias, layers[4]->weight, layers[5]->weight})};
    const auto one = world.adamw(first, usual());
    const auto other = world.adamw(second, AdamW::Options(1e-3));
    const at::Tensor untouched = world.model->layers[1]->weight.detach().clone();
    Tensors results;
    for (int i = 0; i < 4; ++i) {
      world.train(*one, results);
      world.train(*other, results);
      world.model->zero_grad();
    }
    EXPECT_TRUE(same_bits(world.model->layers[1]->weight.detach().clone(), untouched));
    return results;
  });
}

TEST(AdamW, follows_a_scheduler) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(usual());
    torch::optim::StepLR scheduler(*optimizer, /*step_size=*/2, /*gamma=*/0.1);
    Tensors results;
    for (int i = 0; i < 6; ++i) {
      world.train(*optimizer, results);
      scheduler.step();
    }
    EXPECT_NEAR(optimizer->param_groups()[0].options().get_lr(), 1e-4, 1e-10) << "it scheduled nothing";
    return results;
  });
}

TEST(AdamW, at_learning_rate_zero_changes_no_parameter_and_still_learns_moments) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(AdamW::Options(0).weight_decay(0.1));
    Tensors before, after, results;
    add_parameters(world, before);
    world.train(*optimizer, results);
    world.train(*optimizer, results);
    add_parameters(world, after);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bits(before[i], after[i])) << i;
    }
    optimizer->param_groups()[0].options().set_lr(1e-2);
    world.train(*optimizer, results);
    return results;
  });
}

TEST(AdamW, goes_up_the_gradient_to_maximize_with_a_session_and_without) {
  const auto train = [](bool managed, bool maximize, double sign) {
    torch::manual_seed(7);
    at::set_num_threads(1);
    const auto model = std::make_shared<Mlp>();
    std::optional<Session> session;
    if (managed) {
      session.emplace(tight());
      session->manage(*model);
    }
    AdamW optimizer = managed ? AdamW(*session) : AdamW(model->parameters());
    optimizer.maximize(maximize);
    for (int i = 0; i < 3; ++i) {
      (sign * model->forward(torch::randn({4, width}))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const at::NoGradGuard no_grad;
    Tensors copies;
    for (const at::Tensor& parameter : model->parameters()) copies.push_back(parameter.clone());
    return copies;
  };
  const Tensors down = train(false, false, -1);
  for (const bool managed : {false, true}) {
    const Tensors up = train(managed, true, 1);
    for (std::size_t i = 0; i < down.size(); ++i) EXPECT_TRUE(same_bits(up[i], down[i])) << i;
  }
}

TEST(AdamW, clips_by_the_norm_that_torch_computes) {
  World world;
  const auto optimizer = world.adamw(usual());
  optimizer->max_gradient_norm(1e-3);
  world.model->forward(batch()).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(world.model->parameters(), 1e30);
  optimizer->step();
  EXPECT_NEAR(optimizer->gradient_norm().value(), expected, expected * 1e-6);
}

TEST(AdamW, takes_a_gradient_of_another_type_as_one_of_the_parameter_s) {
  for (const auto& [parameters, gradients] :
       {std::pair{at::kBFloat16, at::kFloat}, std::pair{at::kBFloat16, at::kHalf}, std::pair{at::kFloat, at::kDouble},
        std::pair{at::kFloat, at::kBFloat16}, std::pair{at::kFloat, at::kHalf}}) {
    SCOPED_TRACE(std::string(c10::toString(parameters)) + " with gradients of " + c10::toString(gradients));
    const auto train = [type = parameters, given = gradients](World& world, bool converted) {
      const auto optimizer = world.adamw(usual());
      for (int step = 0; step < 2; ++step) {
        torch::manual_seed(step);
        for (at::Tensor& parameter : world.model->parameters()) {
          const at::Tensor gradient = torch::randn(parameter.sizes(), at::kDouble).to(given);
          parameter.mutable_grad() = converted ? gradient.to(type) : gradient;
        }
        optimizer->step();
        optimizer->zero_grad();
      }
      Tensors trained;
      add_parameters(world, trained);
      return trained;
    };
    World as_given(nullptr, parameters);
    World as_converted(nullptr, parameters);
    expect_same_bits(train(as_given, false), train(as_converted, true));
    expect_the_bits_of_unmanaged([&](World& world) { return train(world, false); }, parameters);
  }
}

TEST(AdamW, begins_without_the_states_of_one_that_was_there_before) {
  at::set_num_threads(1);
  const auto train = [](const std::optional<Config>& config) {
    torch::manual_seed(5);
    std::optional<Session> session;
    if (config) {
      session.emplace(*config);
    }
    Mlp model;
    if (session) {
      session->manage(model);
    }
    for (const double rate : {1e-2, 3e-3}) {
      const auto optimizer = session ? std::make_unique<AdamW>(*session, AdamW::Options(rate))
                                     : std::make_unique<AdamW>(model.parameters(), AdamW::Options(rate));
      for (int step = 0; step < 3; ++step) {
        model.forward(batch()).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    session.reset();
    return model.layers[1]->weight.detach().clone();
  };
  EXPECT_TRUE(same_bits(train(tight()), train(std::nullopt)));
}

TEST(AdamW, steps_with_a_closure) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(usual());
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      const torch::NoGradGuard no_grad;  // the closure builds a graph all the same
      results.push_back(optimizer
                            ->step([&] {
                              optimizer->zero_grad();
                              at::Tensor loss = world.model->forward(batch());
                              loss.backward();
                              return loss;
                            })
                            .detach());
    }
    return results;
  });
}

TEST(AdamW, without_any_gradient_does_nothing) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->max_gradient_norm(1.0);
  Tensors before, after;
  add_parameters(world, before);
  optimizer->step();
  add_parameters(world, after);
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(same_bits(before[i], after[i])) << i;
  }
  EXPECT_EQ(optimizer->gradient_norm().value_or(-1), 0);
}

TEST(AdamW, updates_bf16_parameters_by_an_fp32_master) {
  expect_the_bits_of_unmanaged(
      [](World& world) {
        const auto optimizer = world.adamw(AdamW::Options(1e-4));
        optimizer->max_gradient_norm(1e-2);
        Tensors results;
        const at::Tensor before = world.model->layers[0]->weight.detach().clone();
        for (int i = 0; i < 8; ++i) {
          world.train(*optimizer, results);
        }
        // Steps of 1e-4 are lost on weights above 0.03, three quarters of them, unless a master adds them up.
        const at::Tensor after = world.model->layers[0]->weight.detach().clone();
        EXPECT_GT((after != before).to(at::kFloat).mean().item<double>(), 0.5);
        if (world.session) {
          EXPECT_GT(world.session->memory_usage().peak(Tier::host, Kind::master), 0u);
        }
        return results;
      },
      at::kBFloat16);
}

TEST(AdamW, honours_what_the_program_writes_into_bf16_parameters_with_a_split_master_too) {
  at::Tensor parameter = torch::full({64}, 0.3, at::kBFloat16).requires_grad_(true);
  AdamW optimizer(Tensors{parameter}, AdamW::Options(1e-3), {.states = "split"});
  for (const double written : {2.0, 0.0, -0.0, 1e-3}) {
    parameter.mutable_grad() = torch::full({64}, 0.1, at::kBFloat16);
    optimizer.step();
    {
      const at::NoGradGuard no_grad;
      parameter.fill_(written);
    }
    optimizer.zero_grad();
    parameter.mutable_grad() = torch::full({64}, 0.1, at::kBFloat16);
    optimizer.step();
    EXPECT_TRUE(torch::allclose(parameter.detach().to(at::kFloat), torch::full({64}, written), 1e-2, 2e-3)) << written;
  }
}

TEST(AdamW, honours_what_the_program_writes_into_bf16_parameters) {
  expect_the_bits_of_unmanaged(
      [](World& world) {
        const auto optimizer = world.adamw(usual());
        Tensors results;
        for (int i = 0; i < 3; ++i) {
          world.train(*optimizer, results);
          const torch::NoGradGuard no_grad;
          world.model->layers[2]->weight.clamp_(-0.02, 0.02);
          world.model->layers[4]->weight.mul_(1.5);
        }
        return results;
      },
      at::kBFloat16);
}

}  // namespace terrace::testing
