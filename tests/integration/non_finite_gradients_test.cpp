// What an optimizer does with gradients that are not finite.

#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

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
        expect_same_bits(actual, expected);
      }
      World unmanaged(nullptr, type, {.non_finite = "skip"});
      const Tensors actual = train(unmanaged, true);
      expect_same_bits(actual, expected);
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

TEST(NonFiniteGradients, of_one_optimizer_are_told_of_by_its_own_next_step_and_cost_another_none) {
  for (const char* update : {"deferred", "immediate"}) {
    SCOPED_TRACE(update);
    Config config = tight();
    config.optimizer.non_finite = "error";
    config.optimizer.update = update;
    World world(&config);
    const auto layers = [&](std::size_t from, std::size_t to) {
      AdamW::Groups groups(1, Group(Tensors{}));
      for (std::size_t layer = from; layer < to; ++layer) {
        for (const at::Tensor& each : world.model->layers[layer]->parameters()) groups[0].params().push_back(each);
      }
      return groups;
    };
    const auto refused = world.adamw(layers(3, 6), usual());
    const auto other = world.adamw(layers(0, 3), usual());
    Tensors before, after;
    add_parameters(world, before);
    backward(world);
    poison(world);
    if (update == std::string("immediate")) {
      EXPECT_THROW(refused->step(), NonFiniteGradient);
    } else {
      refused->step();
    }
    EXPECT_NO_THROW(other->step());
    EXPECT_NO_THROW(other->step()) << "of the same gradients again";
    world.model->zero_grad();
    if (update == std::string("deferred")) {
      EXPECT_THROW(refused->step(), NonFiniteGradient);
    }
    EXPECT_NO_THROW(refused->step()) << "once";
    EXPECT_NO_THROW(world.session->synchronize());
    add_parameters(world, after);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(same_bits(before[i], after[i]), i >= 6) << i;
    }
  }
}

TEST(NonFiniteGradients, that_nobody_has_heard_of_are_over_with_a_load_that_succeeds) {
  const TemporaryFolder folder;
  Config config = tight();
  config.optimizer.non_finite = "error";
  World world(&config);
  const auto optimizer = world.adamw(usual());
  Tensors losses, saved, loaded;
  world.train(*optimizer, losses);
  world.session->save(folder.path() / "checkpoint");
  add_parameters(world, saved);
  const auto take_a_step_that_is_refused = [&] {
    backward(world);
    poison(world);
    optimizer->step();
    optimizer->zero_grad();
  };
  world.train(*optimizer, losses);
  take_a_step_that_is_refused();
  EXPECT_NO_THROW(world.session->load(folder.path() / "checkpoint"));
  add_parameters(world, loaded);
  expect_same_bits(loaded, saved);
  EXPECT_NO_THROW(world.session->synchronize());
  EXPECT_NO_THROW(world.train(*optimizer, losses));
  take_a_step_that_is_refused();
  EXPECT_THROW(world.session->load(folder.path() / "none"), ConfigError);
  EXPECT_THROW(world.session->synchronize(), NonFiniteGradient) << "nothing was loaded";
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

}  // namespace
}  // namespace terrace::testing
