// A session that goes to a checkpoint goes on as the one that saved it would have, to the last bit, wherever bytes
// rest in either.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_writer.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/checkpoint_session_fixture.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using World = CheckpointWorld;

constexpr std::int64_t width = Net::width;

TEST_F(CheckpointSession, goes_on_to_the_bits_of_a_run_that_was_not_interrupted_wherever_bytes_rest) {
  const std::vector<Config> configs{on_host(), on_nvme(nvme), on_device(), on_host(256 << 10)};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (std::size_t saver = 0; saver < configs.size(); ++saver) {
      Losses uninterrupted;
      {
        World world(configs[saver], type);
        uninterrupted = world.train(6);
      }
      save_after_three_steps(configs[saver], type);
      EXPECT_EQ(later_losses, (Losses(uninterrupted.begin() + 3, uninterrupted.end()))) << "saving changed the run";
      const std::size_t loader = (saver + 1) % configs.size();
      SCOPED_TRACE("from " + std::to_string(saver) + " to " + std::to_string(loader) + " in " + c10::toString(type));
      for (const bool optimizer_first : {false, true}) {
        World world(configs[loader], type, /*seed=*/99);
        if (optimizer_first) world.make_optimizer();
        EXPECT_EQ(world.session.load(folder), (CheckpointNotes{{"step", "3"}}));
        EXPECT_EQ(world.train(3), later_losses);
        expect_same_bits(world.copies(), later_copies);
      }
    }
  }
}

TEST_F(CheckpointSession, goes_on_with_states_of_every_format_and_refuses_those_of_another) {
  const std::vector<std::string> formats{"float32", "split", "split_bfloat16"};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (std::size_t i = 0; i < formats.size(); ++i) {
      SCOPED_TRACE(formats[i] + " of " + c10::toString(type));
      Config config = on_nvme(nvme);
      config.optimizer.states = formats[i];
      save_after_three_steps(config, type);
      {
        World world(config, type, 9);
        world.session.load(folder);
        EXPECT_EQ(world.train(3), later_losses);
        expect_same_bits(world.copies(), later_copies);
      }
      const std::size_t other = (i + 1) % formats.size();
      config.optimizer.states = formats[other];
      World world(config, type, 9);
      const Tensors before = world.copies();
      if (type == at::kFloat && i == 0) {
        world.session.load(folder);  // without a master there is nothing to split
        EXPECT_EQ(world.train(3), later_losses);
        continue;
      }
      const std::string message = message_of<ConfigError>([&] { world.session.load(folder); });
      EXPECT_THAT(message, HasSubstr("of 'tied' is "));
      EXPECT_THAT(message, HasSubstr("the same optimizer.states"));
      expect_same_bits(world.copies(), before);
    }
  }
}

TEST_F(CheckpointSession, goes_back_to_a_checkpoint_in_the_same_session) {
  World world(on_nvme(nvme), at::kBFloat16);
  world.session.save(folder);
  const Losses from_the_start = world.train(3);
  world.session.load(folder);
  EXPECT_EQ(world.train(3), from_the_start) << "states of no update are none";
  world.session.save(folder);
  const Losses later = world.train(2);
  world.train(2);
  world.session.load(folder);
  EXPECT_EQ(world.train(2), later);
}

TEST_F(CheckpointSession, what_is_loaded_outlives_the_optimizer_of_what_was_before) {
  World world(on_host());
  world.train(3);
  world.session.save(folder);
  const Losses later = world.train(2);
  world.session.load(folder);
  world.make_optimizer();  // the one before ends after the load
  EXPECT_EQ(world.train(2), later);
}

TEST_F(CheckpointSession, moments_end_with_their_optimizer) {
  Losses later;
  {
    World world(on_host());
    world.train(3);
    world.optimizer.reset();
    world.session.save(folder);
    later = world.train(2);
  }
  for (const CheckpointRecord& record : manifest_in(folder).records) EXPECT_EQ(record.updates, 0) << record.name;
  World world(on_host(), at::kFloat, 99);
  world.session.load(folder);
  EXPECT_EQ(world.train(2), later);
}

using Step = std::function<float(int number)>;

float loss_of(World& world) {
  const at::Tensor loss = world.model->forward(torch::randn({8, width}).to(world.model->scale.scalar_type()));
  loss.backward();
  return loss.item<float>();
}

/// A program's steps after a load are those after the save. `program` makes it, for its steps in order.
void expect_goes_on(
    const std::filesystem::path& folder, const TemporaryFolder& nvme, const std::function<Step(World&)>& program,
    at::ScalarType type = at::kFloat, const std::function<void(World&)>& before_load = [](World&) {}) {
  Losses later;
  Tensors copies;
  {
    World world(on_host(), type);
    const Step step = program(world);
    for (int i = 0; i < 3; ++i) step(i);
    world.session.save(folder);
    for (int i = 3; i < 6; ++i) later.push_back(step(i));
    copies = world.copies();
  }
  World world(on_nvme(nvme), type, /*seed=*/99);
  const Step step = program(world);
  before_load(world);
  world.session.load(folder);
  Losses losses;
  for (int i = 3; i < 6; ++i) losses.push_back(step(i));
  EXPECT_EQ(losses, later);
  expect_same_bits(world.copies(), copies);
}

AdamW::Groups two_groups(const Net& model) {
  std::vector<at::Tensor> first = model.up->parameters();
  std::vector<at::Tensor> second = model.down->parameters();
  for (const at::Tensor& parameter : model.norm->parameters()) second.push_back(parameter);
  return {torch::optim::OptimizerParamGroup(first), torch::optim::OptimizerParamGroup(second)};
}

TEST_F(CheckpointSession, two_optimizers_go_on_with_their_own_parameters) {
  expect_goes_on(folder, nvme, [](World& world) -> Step {
    const AdamW::Groups groups = two_groups(*world.model);
    const auto first = std::make_shared<AdamW>(world.session, AdamW::Groups{groups[0]}, AdamW::Options(1e-2));
    const auto second = std::make_shared<AdamW>(world.session, AdamW::Groups{groups[1]}, AdamW::Options(1e-3));
    return [&world, first, second](int number) {
      const float loss = loss_of(world);
      first->step();
      if (number % 2 == 0) second->step();
      first->zero_grad();
      second->zero_grad();
      return loss;
    };
  });
}

TEST_F(CheckpointSession, groups_go_on_with_their_own_options) {
  expect_goes_on(folder, nvme, [](World& world) -> Step {
    AdamW::Groups groups = two_groups(*world.model);
    groups[0].set_options(std::make_unique<AdamW::Options>(AdamW::Options(1e-2).weight_decay(0.1)));
    groups[1].set_options(std::make_unique<AdamW::Options>(AdamW::Options(1e-3).betas({0.8, 0.9})));
    const auto optimizer = std::make_shared<AdamW>(world.session, groups);
    return [&world, optimizer](int) {
      const float loss = loss_of(world);
      optimizer->step();
      optimizer->zero_grad();
      return loss;
    };
  });
}

/// All parameters in one AdamW, and what the program does besides in each step.
std::function<Step(World&)> meddling(std::function<void(World&, int)> before, std::function<void(World&, int)> meddle,
                                     std::function<void(World&, int)> after) {
  return [before, meddle, after](World& world) -> Step {
    world.make_optimizer();
    return [&world, before, meddle, after](int number) {
      before(world, number);
      const float loss = loss_of(world);
      meddle(world, number);
      world.optimizer->step();
      world.optimizer->zero_grad();
      after(world, number);
      return loss;
    };
  };
}

const std::function<void(World&, int)> nothing = [](World&, int) {};

TEST_F(CheckpointSession, parameters_of_one_chunk_have_their_own_counts_of_updates) {
  const auto without_a_gradient = [](World& world, int number) {
    if (number == 1 || number == 4) world.model->down->weight.mutable_grad() = at::Tensor();
  };
  expect_goes_on(folder, nvme, meddling(nothing, without_a_gradient, nothing));
  for (const CheckpointRecord& record : manifest_in(folder).records) {
    if (record.kind == CheckpointRecord::Kind::parameter && record.name.starts_with("down.")) {
      EXPECT_EQ(record.updates, record.name == "down.weight" ? 2 : 3);
    }
  }
}

TEST_F(CheckpointSession, a_parameter_that_was_edited_and_its_master_are_kept_as_they_are) {
  expect_goes_on(folder, nvme,
                 meddling(nothing, nothing,
                          [](World& world, int number) {
                            const at::NoGradGuard no_grad;
                            if (number == 2 || number == 4) world.model->up->weight.mul_(0.5);
                          }),
                 at::kBFloat16);
}

TEST_F(CheckpointSession, a_parameter_that_is_unfrozen_after_the_save_goes_on) {
  expect_goes_on(folder, nvme,
                 meddling(
                     [](World& world, int number) {
                       if (number == 4) world.model->scale.set_requires_grad(true);
                     },
                     nothing, nothing));
}

TEST_F(CheckpointSession, a_parameter_that_was_unfrozen_before_the_save_goes_on_where_it_is_unfrozen_before_the_load) {
  expect_goes_on(folder, nvme,
                 meddling(
                     [](World& world, int number) {
                       if (number == 1) world.model->scale.set_requires_grad(true);
                     },
                     nothing, nothing),
                 at::kFloat, [](World& world) { world.model->scale.set_requires_grad(true); });
}

TEST_F(CheckpointSession, saves_to_a_folder_whose_lock_the_program_holds) {
  World world(on_host());
  CheckpointLock lock(checkpoint_files(), folder);
  world.session.save(lock, {{"save", "1"}});
  EXPECT_THAT(message_of<ConfigError>([&] { world.session.save(folder); }), HasSubstr("another process is saving"));
  world.session.save(lock, {{"save", "2"}});
  EXPECT_EQ(world.session.load(folder), (CheckpointNotes{{"save", "2"}}));
}

TEST_F(CheckpointSession, keeps_budgets) {
  World world(on_nvme(nvme));
  world.train(2);
  world.session.save(folder);
  world.session.load(folder);
  const MemoryUsage usage = world.session.memory_usage();
  for (const Tier tier : all_tiers) EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
}

TEST_F(CheckpointSession, changes_the_version_of_what_it_loads) {
  World world(on_host());
  world.session.save(folder);
  const auto before = world.model->down->weight._version();
  world.session.load(folder);
  EXPECT_GT(world.model->down->weight._version(), before);
}

struct Buffers : torch::nn::Module {
  Buffers() {
    whole = register_buffer("whole", torch::arange(12, torch::kLong).view({3, 4}));
    turned = register_buffer("turned", torch::arange(12, torch::kFloat).view({3, 4}).t());
    large = register_buffer("large", torch::arange(10000, torch::kInt).view({10, 10, 100}).permute({2, 0, 1}));
    empty = register_buffer("empty", torch::empty({0, 3}));
    repeated = register_buffer("repeated", torch::tensor({true, false}).unsqueeze(1).expand({2, 5}));
    const at::Tensor shared = torch::arange(8, torch::kDouble);
    first_half = register_buffer("first_half", shared.slice(0, 0, 4));
    second_half = register_buffer("second_half", shared.slice(0, 4, 8));
  }
  at::Tensor whole, turned, large, empty, repeated, first_half, second_half;
};

TEST_F(CheckpointSession, loads_buffers_of_every_layout_in_place) {
  Tensors saved;
  {
    Session session(on_host());
    Buffers model;
    session.manage(model);
    for (const at::Tensor& buffer : model.buffers()) saved.push_back(buffer.clone());
    session.save(folder);
  }
  Session session(on_host());
  Buffers model;
  const Tensors before = model.buffers();
  session.manage(model);
  model.whole.zero_();
  model.turned.zero_();
  model.large.zero_();
  model.first_half.zero_();
  model.second_half.zero_();
  model.repeated.slice(1, 0, 1).logical_not_();
  session.load(folder);
  expect_same_bits(model.buffers(), saved);
  EXPECT_TRUE(before[0].is_same(model.whole));
  EXPECT_EQ(model.turned.stride(0), 1);
}

TEST_F(CheckpointSession, buffers_whose_storage_was_replaced_are_counted_and_saved) {
  {
    World world(on_host());
    const std::uint64_t counted = world.session.memory_usage().now(Tier::device, Kind::buffer);
    EXPECT_GT(counted, 0U);
    world.model->norm->running_mean.set_data(torch::full({width}, 7.0f));
    EXPECT_LT(world.session.memory_usage().now(Tier::device, Kind::buffer), counted);
    world.session.save(folder);
    EXPECT_EQ(world.session.memory_usage().now(Tier::device, Kind::buffer), counted);
  }
  World world(on_host());
  world.session.load(folder);
  EXPECT_TRUE(world.model->norm->running_mean.eq(7).all().item<bool>());
}

TEST_F(CheckpointSession, a_name_that_is_there_already_gets_a_number) {
  Session session(on_host());
  torch::nn::Sequential first(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  torch::nn::Sequential second(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  session.manage(*first);
  session.manage(*second);
  session.manage(*first);
  std::vector<std::string> names;
  session.for_each_parameter([&](const std::string& name, at::Tensor&) { names.push_back(name); }, Access::read);
  EXPECT_THAT(names, ::testing::ElementsAre("0.weight", "0.bias", "1.weight", "1.bias", "0.weight#2", "0.bias#2",
                                            "1.weight#2", "1.bias#2"));
  {
    const at::NoGradGuard no_grad;
    second[0]->as<torch::nn::Linear>()->weight.fill_(2);
    second[1]->as<torch::nn::BatchNorm1d>()->running_mean.fill_(3);
    session.save(folder);
    second[0]->as<torch::nn::Linear>()->weight.fill_(4);
    second[1]->as<torch::nn::BatchNorm1d>()->running_mean.fill_(4);
    session.load(folder);
    EXPECT_TRUE(second[0]->as<torch::nn::Linear>()->weight.eq(2).all().item<bool>());
    EXPECT_TRUE(second[1]->as<torch::nn::BatchNorm1d>()->running_mean.eq(3).all().item<bool>());
  }
}

TEST_F(CheckpointSession, the_names_of_a_tied_parameter_are_kept) {
  World world(on_host());
  world.session.save(folder);
  const CheckpointManifest manifest = manifest_in(folder);
  for (const CheckpointRecord& record : manifest.records) {
    if (record.kind == CheckpointRecord::Kind::parameter && (record.name == "tied" || record.name == "up.weight")) {
      EXPECT_EQ(record.aliases, std::vector<std::string>{record.name == "tied" ? "up.weight" : "tied"});
      return;
    }
  }
  FAIL() << "it was not saved";
}

TEST_F(CheckpointSession, states_of_what_needs_no_gradient_now_are_left_out) {
  save_after_three_steps(on_host());
  Session session(on_host());
  const auto model = std::make_shared<Net>();
  model->to(at::kFloat);
  model->up->weight.set_requires_grad(false);
  session.manage(*model);
  set_log_level(LogLevel::warning);
  ::testing::internal::CaptureStderr();
  session.load(folder);
  const std::string logged = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(logged, HasSubstr("optimizer states are left out of what needs no gradient now"));
  EXPECT_THAT(logged, HasSubstr("'tied'; to keep them, load before freezing"));
  session.save(folder);
  const CheckpointManifest manifest = manifest_in(folder);
  for (const CheckpointRecord& record : manifest.records) {
    if (record.kind == CheckpointRecord::Kind::parameter) {
      const bool is_frozen = record.name == "tied" || record.name == "up.weight" || record.name == "scale";
      EXPECT_EQ(record.updates, is_frozen ? 0 : 3) << record.name;
    }
  }
}

TEST_F(CheckpointSession, a_model_that_is_no_more_is_still_saved) {
  Session session(on_host());
  {
    torch::nn::BatchNorm1d model(3);
    session.manage(*model);
  }
  session.save(folder);
  session.load(folder);
}

}  // namespace
}  // namespace terrace::testing
