// Which parameters, gradients and options an AdamW takes, and which it refuses.

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {

TEST(AdamW, takes_parameters_managed_later_into_the_default_group_at_the_next_step) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(usual());
    auto& members = optimizer->param_groups()[0].params();
    Tensors results;
    world.train(*optimizer, results);
    world.model->add();
    world.manage();
    const auto& added = world.model->layers.back();
    if (!world.session) {
      members.push_back(added->weight);
      members.push_back(added->bias);
    }
    EXPECT_EQ(members.size(), world.session ? 12u : 14u);
    const at::Tensor before = added->weight.detach().clone();
    world.train(*optimizer, results);
    EXPECT_EQ(members.size(), 14u);
    EXPECT_FALSE(same_bits(added->weight.detach().clone(), before));
    world.train(*optimizer, results);
    EXPECT_EQ(members.size(), 14u);
    return results;
  });
}

TEST(AdamW, takes_parameters_managed_later_into_the_group_that_the_program_adds_for_them) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(usual());
    Tensors results;
    world.train(*optimizer, results);
    world.model->add();
    world.manage();
    const auto& added = world.model->layers.back();
    optimizer->add_param_group(Group({added->weight, added->bias}, std::make_unique<AdamW::Options>(1e-4)));
    for (int i = 0; i < 2; ++i) {
      world.train(*optimizer, results);
    }
    EXPECT_EQ(optimizer->param_groups()[0].params().size(), 12u);
    EXPECT_EQ(optimizer->param_groups()[1].params().size(), 2u);
    return results;
  });
}

TEST(AdamW, with_explicit_groups_takes_nothing_else) {
  const Config config = tight();
  World world(&config);
  AdamW optimizer(*world.session, {Group({world.model->layers[0]->weight})}, usual());
  world.model->add();
  world.manage();
  Tensors losses;
  world.train(optimizer, losses);
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 1u);
}

TEST(AdamW, refuses_options_out_of_range_and_amsgrad_at_once_and_at_the_step) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<std::string, AdamW::Options>> wrong{
      {"amsgrad", AdamW::Options(1e-3).amsgrad(true)},
      {"learning rate", AdamW::Options(-1e-3)},
      {"learning rate", AdamW::Options(nan)},
      {"learning rate", AdamW::Options(std::numeric_limits<double>::infinity())},
      {"eps", AdamW::Options(1e-3).eps(-1)},
      {"first beta", AdamW::Options(1e-3).betas({1.0, 0.9})},
      {"first beta", AdamW::Options(1e-3).betas({-0.1, 0.9})},
      {"second beta", AdamW::Options(1e-3).betas({0.9, 1.5})},
      {"eps", AdamW::Options(1e-3).eps(std::numeric_limits<double>::infinity())},
      {"weight decay", AdamW::Options(1e-3).weight_decay(-0.1)},
      {"weight decay", AdamW::Options(1e-3).weight_decay(std::numeric_limits<double>::infinity())},
  };
  const Config config = tight();
  for (const Config* with : {static_cast<const Config*>(nullptr), &config}) {
    World world(with);
    Tensors before, after;
    add_parameters(world, before);
    for (const auto& [text, options] : wrong) {
      SCOPED_TRACE(text);
      expect_logic_error(text, [&] { world.adamw(options); });
      const auto optimizer = world.adamw(usual());
      static_cast<AdamW::Options&>(optimizer->param_groups()[0].options()) = options;
      world.model->forward(batch()).backward();
      expect_logic_error(text, [&] { optimizer->step(); });
      world.model->zero_grad();
    }
    add_parameters(world, after);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bits(before[i], after[i])) << i;
    }
  }
}

TEST(AdamW, refuses_a_gradient_norm_that_is_none) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  optimizer->max_gradient_norm(1.0);
  expect_logic_error("max_gradient_norm", [&] { optimizer->max_gradient_norm(-1); });
  expect_logic_error("max_gradient_norm",
                     [&] { optimizer->max_gradient_norm(std::numeric_limits<double>::quiet_NaN()); });
  Tensors losses;
  world.train(*optimizer, losses);
  EXPECT_TRUE(optimizer->gradient_norm().has_value()) << "what was set before stays";
  optimizer->max_gradient_norm(0);
  world.train(*optimizer, losses);
  EXPECT_FALSE(optimizer->gradient_norm().has_value());
}

TEST(AdamW, refuses_a_gradient_of_another_shape_or_without_a_floating_point_and_changes_nothing) {
  const auto refused = [](World& world) {
    const auto optimizer = world.adamw(usual());
    at::Tensor& weight = world.model->layers[0]->weight;
    const at::Tensor before = weight.detach().clone();
    const auto ones = [](at::ScalarType type) { return torch::ones({width, width}, type); };
    for (const auto& [gradient, text] :
         {std::pair{torch::ones({width}), "gradient of shape"}, std::pair{torch::ones({1}), "gradient of shape"},
          std::pair{torch::ones({2 * width, width}), "gradient of shape"},
          std::pair{ones(at::kComplexFloat), "gradient of ComplexFloat"}, std::pair{ones(at::kInt), "gradient of Int"},
          std::pair{ones(at::kBool), "gradient of Bool"}}) {
      weight.mutable_grad() = gradient;
      expect_logic_error(text, [&] { optimizer->step(); });
      EXPECT_TRUE(same_bits(weight.detach().clone(), before));
      weight.mutable_grad() = at::Tensor();
    }
    weight.mutable_grad() = torch::ones({width, width});
    EXPECT_NO_THROW(optimizer->step());
  };
  World ordinary;
  refused(ordinary);
  const Config config = tight();
  World managed(&config);
  refused(managed);
}

namespace {

struct WithDouble : torch::nn::Module {
  WithDouble() : body(register_module("body", std::make_shared<Mlp>(2))) {
    scale = register_parameter("scale", torch::ones({width}, torch::kDouble));
  }
  std::shared_ptr<Mlp> body;
  at::Tensor scale;
};

}  // namespace

TEST(AdamW, refuses_float64_parameters_by_name) {
  const Config config = tight();
  at::set_num_threads(1);
  Session session(config);
  WithDouble model;
  session.manage(model);
  expect_logic_error("'scale'", [&] { AdamW optimizer(session, usual()); });
  expect_logic_error("'scale'", [&] { AdamW optimizer(session, {Group({model.scale})}, usual()); });

  // One that is not in its groups, or frozen, does not disturb it.
  AdamW optimizer(session, {Group(model.body->parameters())}, usual());
  (model.body->forward(batch()) * model.scale.sum()).backward();
  const at::Tensor before = model.body->layers[0]->weight.detach().clone();
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_FALSE(same_bits(model.body->layers[0]->weight.detach().clone(), before));
  EXPECT_EQ(model.scale.grad().scalar_type(), at::kDouble);
}

TEST(AdamW, refuses_a_float64_parameter_that_is_managed_later_by_name) {
  const Config config = tight();
  World world(&config);
  const auto optimizer = world.adamw(usual());
  WithDouble later;
  world.session->manage(later);
  expect_logic_error("'scale'", [&] { optimizer->step(); });
}

TEST(AdamW, accepts_a_frozen_float64_parameter) {
  const Config config = tight();
  at::set_num_threads(1);
  Session session(config);
  WithDouble model;
  model.scale.requires_grad_(false);
  session.manage(model);
  AdamW optimizer(session, usual());
  (model.body->forward(batch()) * model.scale.sum()).backward();
  EXPECT_NO_THROW(optimizer.step());
}

TEST(AdamW, takes_a_parameter_that_was_unfrozen_after_manage) {
  const Config config = tight();
  at::set_num_threads(1);
  Session session(config);
  Mlp model;
  model.layers[1]->weight.requires_grad_(false);
  session.manage(model);
  AdamW optimizer(session, usual());
  model.forward(batch()).backward();
  optimizer.step();
  optimizer.zero_grad();
  const at::Tensor before = model.layers[1]->weight.detach().clone();
  model.layers[1]->weight.requires_grad_(true);
  model.forward(batch()).backward();
  optimizer.step();
  EXPECT_FALSE(torch::equal(model.layers[1]->weight, before));
  EXPECT_ANY_THROW(model.layers[1]->weight.data_ptr()) << "it is still managed";
}

TEST(AdamW, takes_a_parameter_that_was_unfrozen_before_it_was_made) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  model.layers[1]->weight.requires_grad_(false);
  session.manage(model);
  model.layers[1]->weight.requires_grad_(true);
  AdamW optimizer(session, usual());
  const at::Tensor before = model.layers[1]->weight.detach().clone();
  model.forward(batch()).backward();
  optimizer.step();
  optimizer.zero_grad();
  EXPECT_FALSE(model.layers[1]->weight.grad().defined());
  EXPECT_FALSE(torch::equal(model.layers[1]->weight, before));
}

TEST(AdamW, takes_a_parameter_that_was_replaced_and_unfrozen_at_once) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  model.layers[1]->weight.requires_grad_(false);
  session.manage(model);
  AdamW optimizer(session, usual());
  model.layers[1]->weight.set_data(torch::ones({width, width}));
  model.layers[1]->weight.requires_grad_(true);
  model.forward(batch()).backward();
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_FALSE(torch::equal(model.layers[1]->weight, torch::ones({width, width})));
}

TEST(AdamW, goes_on_where_a_parameter_was_frozen_and_replaced_while_a_graph_holds_it) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  session.manage(model);
  AdamW optimizer(session, usual());
  std::vector<at::Tensor> losses;
  const auto step = [&] {
    losses.push_back(model.forward(batch()));
    losses.back().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  at::Tensor& weight = model.layers[1]->weight;
  weight.requires_grad_(false);
  weight.set_data(torch::ones({width, width}));
  EXPECT_NO_THROW(step());
  EXPECT_TRUE(torch::equal(weight, torch::ones({width, width})));
  weight.requires_grad_(true);
  EXPECT_NO_THROW(step());
  EXPECT_FALSE(torch::equal(weight, torch::ones({width, width})));
}

TEST(AdamW, takes_a_parameter_that_was_frozen_turned_to_bf16_and_unfrozen) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  session.manage(model);
  for (const at::Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(false);
  }
  model.to(at::kBFloat16);
  AdamW optimizer(session, usual());
  for (const at::Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(true);
  }
  const at::Tensor before = model.layers[1]->weight.detach().clone();
  model.forward(batch(at::kBFloat16)).backward();
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_FALSE(torch::equal(model.layers[1]->weight, before));
}

TEST(AdamW, refuses_by_name_a_gradient_of_what_requires_none) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  model.layers[1]->weight.requires_grad_(false);
  session.manage(model);
  AdamW optimizer(session, {torch::optim::OptimizerParamGroup(model.parameters())}, usual());
  model.layers[1]->weight.mutable_grad() = torch::ones({4});
  expect_logic_error("'layer1.weight'", [&] { optimizer.step(); });
}

TEST(AdamW, two_over_one_parameter_are_refused_by_its_name) {
  at::set_num_threads(1);
  Session session(tight());
  Mlp model;
  session.manage(model);
  std::optional<AdamW> first(std::in_place, session, usual());
  AdamW second(session, {torch::optim::OptimizerParamGroup({model.layers[1]->weight})}, usual());
  model.forward(batch()).backward();
  first->step();
  expect_logic_error("'layer1.weight'", [&] { second.step(); });
  first.reset();
  EXPECT_NO_THROW(second.step());
}

namespace {

struct Layer : torch::nn::Module {
  explicit Layer(const at::Tensor& of) : weight(register_parameter("weight", of)) {}
  at::Tensor weight;
};

/// One weight in two layers, as language models tie the first to the last: twice among its parameters.
struct Tied : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) const {
    return torch::linear(torch::relu(torch::linear(x, first->weight)), last->weight).square().mean();
  }

  std::shared_ptr<Layer> first = register_module("first", std::make_shared<Layer>(torch::randn({width, width})));
  std::shared_ptr<Layer> last = register_module("last", std::make_shared<Layer>(first->weight));
};

}  // namespace

TEST(AdamW, updates_a_tied_parameter_once_however_often_it_is_listed) {
  const auto train = [](Session* session, bool listed_twice) {
    at::set_num_threads(1);
    torch::manual_seed(3);
    Tied model;
    EXPECT_EQ(model.parameters().size(), 2u);
    if (session != nullptr) session->manage(model);
    const Tensors listed = listed_twice ? model.parameters() : Tensors{model.first->weight};
    AdamW optimizer = session != nullptr ? AdamW(*session, {Group(listed)}, usual()) : AdamW(listed, usual());
    for (int i = 0; i < 3; ++i) {
      model.forward(batch()).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    if (listed_twice) optimizer.param_groups()[0].params() = model.parameters();  // and so where that is done later
    model.forward(batch()).backward();
    optimizer.step();
    return model.first->weight.detach().clone();
  };
  const at::Tensor expected = train(nullptr, false);
  EXPECT_TRUE(same_bits(train(nullptr, true), expected));
  std::optional<Session> session(std::in_place, tight());
  EXPECT_TRUE(same_bits(train(&*session, true), expected));
}

TEST(AdamW, refuses_a_parameter_in_two_groups_and_changes_nothing) {
  const Config config = tight();
  for (const Config* with : {static_cast<const Config*>(nullptr), &config}) {
    World world(with);
    const at::Tensor weight = world.model->layers[0]->weight;
    AdamW::Groups groups{Group({weight}), Group({world.model->layers[1]->weight, weight})};
    expect_logic_error("is in group 0 and in group 1", [&] { world.adamw(groups, usual()); });
    groups[1].params().pop_back();
    const auto optimizer = world.adamw(groups, usual());
    optimizer->param_groups()[1].params().push_back(weight);
    if (with != nullptr) {
      expect_logic_error("is in group 0 and in group 1", [&] { optimizer->update_in_backward(true); });
    }
    Tensors before, after;
    add_parameters(world, before);
    world.model->forward(batch()).backward();
    expect_logic_error("is in group 0 and in group 1", [&] { optimizer->step(); });
    add_parameters(world, after);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << i;
  }
}

TEST(AdamW, refuses_a_step_as_a_whole) {
  const Config config = tight();
  for (const Config* with : {static_cast<const Config*>(nullptr), &config}) {
    World world(with);
    AdamW::Groups groups{Group({world.model->layers[0]->weight}), Group({world.model->layers[1]->weight})};
    groups[1].set_options(std::make_unique<AdamW::Options>(usual()));
    const auto optimizer = world.adamw(groups, usual());
    Tensors losses, before, after;
    world.train(*optimizer, losses);
    add_parameters(world, before);
    world.model->forward(batch()).backward();
    auto& options = static_cast<AdamW::Options&>(optimizer->param_groups()[1].options());
    options.lr(-1);
    expect_logic_error("learning rate", [&] { optimizer->step(); });
    options.lr(1e-2);
    world.model->layers[1]->weight.mutable_grad() = torch::ones({1});
    expect_logic_error("gradient of shape", [&] { optimizer->step(); });
    world.model->layers[1]->weight.mutable_grad() = torch::ones({1}).requires_grad_(true);
    expect_logic_error("gradient of shape", [&] { optimizer->step(); });
    world.model->layers[1]->weight.mutable_grad() = torch::eye(width).to_sparse();
    for (int i = 0; i < 2; ++i) {  // it is not taken away either
      expect_logic_error("sparse gradient", [&] { optimizer->step(); });
    }
    add_parameters(world, after);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << i;
  }
}

TEST(AdamW, that_was_refused_a_step_has_taken_nothing_over) {
  const Config config = tight();
  World world(&config);
  AdamW::Groups groups{Group({world.model->layers[0]->weight}), Group({world.model->layers[1]->weight})};
  groups[1].set_options(std::make_unique<AdamW::Options>(usual()));
  const auto refused = world.adamw(groups, usual());
  static_cast<AdamW::Options&>(refused->param_groups()[1].options()).lr(-1);
  const auto other = world.adamw({Group({world.model->layers[0]->weight})}, usual());
  world.model->forward(batch()).backward();
  expect_logic_error("learning rate", [&] { refused->step(); });
  EXPECT_NO_THROW(other->step());
}

TEST(AdamW, without_a_session_refuses_a_parameter_that_became_another_since_its_first_update) {
  World world;
  const auto optimizer = world.adamw(usual());
  Tensors losses;
  world.train(*optimizer, losses);
  at::Tensor& weight = world.model->layers[0]->weight;
  const at::Tensor before = weight.detach().clone();
  const auto replace = [&](const at::Tensor& by) {
    const torch::NoGradGuard no_grad;
    weight.set_data(by);
    weight.mutable_grad() = torch::ones_like(by);
  };
  for (const at::Tensor& other : {before.to(at::kBFloat16), torch::ones({2 * width, width})}) {
    replace(other.clone());
    expect_logic_error("another type or size", [&] { optimizer->step(); });
    EXPECT_TRUE(same_bits(weight.detach().clone(), other));
    weight.mutable_grad() = at::Tensor();
  }
  replace(before.clone());
  EXPECT_NO_THROW(optimizer->step());
}

}  // namespace terrace::testing
