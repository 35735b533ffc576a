// Updates within backward.

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

/// Of a program that is told whether it updates within backward.
template <class Program>
void expect_the_bits_of_updates_after_it(Program&& train) {
  World plain;
  const Tensors expected = train(plain, false);
  const Config config = tight();
  World managed(&config);
  expect_same_bits(train(managed, true), expected);
}

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
      expect_same_bits(actual, expected);
    }
  }
}

TEST(UpdateInBackward, gives_the_bits_of_updates_after_it_layer_by_layer_too) {
  const auto train = [](bool in_backward) {
    const Config config = tight();
    World world(&config);
    const auto optimizer = world.adamw(usual());
    optimizer->update_in_backward(in_backward);
    Tensors results;
    for (int step = 0; step < 3; ++step) {
      Tensors x{batch(at::kFloat), batch(at::kFloat), batch(at::kFloat)};
      for (auto& layer : world.model->layers) {
        x = layer_major([layer](const at::Tensor& each) mutable { return torch::tanh(layer->forward(each)); },
                        std::move(x));
      }
      const at::Tensor loss = (x[0] + x[1] + x[2]).pow(2).mean();
      loss.backward();  // each parameter is used three times in it
      results.push_back(loss.detach().clone());
      optimizer->step();
      optimizer->zero_grad();
    }
    add_parameters(world, results);
    return results;
  };
  const Tensors expected = train(false);
  const Tensors actual = train(true);
  expect_same_bits(actual, expected);
}

/// Layers in blocks, of which each also adds what the next one's parameters sum up to: their gradients are there before
/// the block that has read them runs again.
at::Tensor blocks_that_read_ahead(World& world) {
  at::Tensor x = batch(at::kFloat);
  auto& layers = world.model->layers;
  for (std::size_t i = 0; i + 1 < layers.size(); i += 2) {
    x = block(
        [layer = layers[i], next = layers[i + 1]](const at::Tensor& value) mutable {
          return torch::tanh(layer(value)) + (next->weight.sum() + next->bias.sum());
        },
        x);
  }
  return x.pow(2).mean();
}

TEST(UpdateInBackward, waits_for_blocks_that_are_to_run_again) {
  const auto train = [](World& world, bool in_backward) {
    const auto optimizer = world.adamw(usual());
    optimizer->update_in_backward(in_backward);
    Tensors results;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = blocks_that_read_ahead(world);
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      results.push_back(loss.detach().clone());
    }
    add_parameters(world, results);
    return results;
  };
  World plain;
  const Tensors expected = train(plain, false);
  for (const char* const activations : {"recompute", "auto", "keep"}) {
    Config config = tight();
    config.placement.activations = activations;
    World managed(&config);
    expect_same_bits(train(managed, true), expected);
  }
}

TEST(UpdateInBackward, leaves_to_step_what_a_block_may_read_again_that_has_not_run) {
  Config config = tight();
  config.placement.activations = "recompute";
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->update_in_backward(true);
  at::Tensor other = blocks_that_read_ahead(world);  // of another backward, that does not come
  blocks_that_read_ahead(world).backward();
  EXPECT_TRUE(world.model->layers[0]->weight.grad().defined());
  optimizer->step();
  optimizer->zero_grad();
  other.reset();
  blocks_that_read_ahead(world).backward();
  EXPECT_FALSE(world.model->layers[0]->weight.grad().defined());
}

TEST(UpdateInBackward, waits_for_what_backward_adds_to_gradients_that_were_there) {
  const auto train = [](World& world, bool in_backward) {
    const auto optimizer = world.adamw(usual());
    optimizer->update_in_backward(in_backward);
    Tensors results;
    for (int step = 0; step < 2; ++step) {
      for (const at::Tensor& parameter : world.model->parameters()) {
        parameter.mutable_grad() = torch::full_like(parameter, 0.25);
      }
      world.train(*optimizer, results);
    }
    add_parameters(world, results);
    return results;
  };
  expect_the_bits_of_updates_after_it(train);
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
  for (const char* non_finite : {"skip", "error"}) {
    config.optimizer.non_finite = non_finite;
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
  expect_the_bits_of_updates_after_it(train);
}

/// The last group learns fastest.
AdamW::Groups two_layers_a_group(World& world) {
  AdamW::Groups groups;
  for (std::size_t layer = 0; layer < 6; layer += 2) {
    Tensors members = world.model->layers[layer]->parameters();
    for (const at::Tensor& parameter : world.model->layers[layer + 1]->parameters()) members.push_back(parameter);
    groups.emplace_back(members, std::make_unique<AdamW::Options>(1e-3 * static_cast<double>(layer + 1)));
  }
  return groups;
}

TEST(UpdateInBackward, goes_by_the_groups_as_they_are_and_not_as_they_were_at_the_last_step) {
  using Change = std::function<void(AdamW::Groups&)>;
  const std::vector<std::pair<std::string, Change>> changes{
      {"the last group goes", [](AdamW::Groups& groups) { groups.pop_back(); }},
      {"the first group goes", [](AdamW::Groups& groups) { groups.erase(groups.begin()); }},
      {"a group has no parameters left", [](AdamW::Groups& groups) { groups[1].params().clear(); }},
      {"a parameter leaves", [](AdamW::Groups& groups) { groups[0].params().erase(groups[0].params().begin() + 1); }},
      {"parameters change groups", [](AdamW::Groups& groups) { groups[0].params().swap(groups[2].params()); }},
      {"all go", [](AdamW::Groups& groups) { groups.clear(); }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    expect_the_bits_of_updates_after_it([&](World& world, bool in_backward) {
      const auto optimizer = world.adamw(two_layers_a_group(world), usual());
      optimizer->update_in_backward(in_backward);
      Tensors results;
      for (int step = 0; step < 4; ++step) {
        if (step == 2) change(optimizer->param_groups());
        world.train(*optimizer, results);
      }
      add_parameters(world, results);
      for (const at::Tensor& parameter : world.model->parameters()) {
        results.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : torch::zeros({0}));
      }
      return results;
    });
  }
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

}  // namespace
}  // namespace terrace::testing
