// Another optimizer than AdamW, with a session and without.

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

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
  expect_same_bits(actual, expected);
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

}  // namespace
}  // namespace terrace::testing
