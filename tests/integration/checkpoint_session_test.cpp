// A session that goes to a checkpoint goes on as the one that saved it would have, to the last bit, wherever bytes
// rest in either; and what is not a checkpoint of it changes nothing.

#include <atomic>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_tensors.h"
#include "integration/checkpoint_writer.h"
#include "offload/choose_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_gpt.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Losses = std::vector<float>;

constexpr std::int64_t width = 60;

/// Has buffers, a tied parameter and one that is frozen, and draws from the generator.
struct Net : torch::nn::Module {
  explicit Net(std::int64_t inner = width)
      : up(register_module("up", torch::nn::Linear(width, inner))),
        norm(register_module("norm", torch::nn::BatchNorm1d(inner))),
        down(register_module("down", torch::nn::Linear(inner, width))),
        dropout(register_module("dropout", torch::nn::Dropout(0.2))) {
    register_parameter("tied", up->weight);
    scale = register_parameter("scale", torch::full({inner}, 0.5), /*requires_grad=*/false);
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = down(dropout(torch::relu(norm(up(x)) * scale)));
    return (y + torch::linear(x, up->weight).mean()).pow(2).mean();
  }

  torch::nn::Linear up;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear down;
  torch::nn::Dropout dropout;
  at::Tensor scale;
};

Config on_host(std::uint64_t chunk_bytes = 16 << 10) {
  Config config;
  config.device.memory = 4 << 20;
  config.host.memory = 4 << 20;
  config.placement.chunk = chunk_bytes;
  config.log.level = LogLevel::error;
  return config;
}

/// Everything at rest on NVMe, and a host that holds little more than one update.
Config on_nvme(const TemporaryFolder& folder) {
  Config config = on_host();
  config.device.chunks = 3 * (16 << 10);
  config.host.memory = 10 * (16 << 10);
  config.timeline.memory = 0;
  config.nvme.paths = {folder.path()};
  config.nvme.memory = 4 << 20;
  const Config::Shares shares{.device = 0, .host = 0, .nvme = 1};
  config.placement.parameters = config.placement.gradients = config.placement.optimizer = shares;
  return config;
}

Config on_device() {
  Config config = on_host(64 << 10);
  const Config::Shares shares{.device = 1, .host = 0, .nvme = 0};
  config.placement.parameters = config.placement.gradients = shares;
  return config;
}

/// A session with a model in training.
struct World {
  explicit World(const Config& config, at::ScalarType type = at::kFloat, std::uint64_t seed = 5,
                 std::int64_t inner = width)
      : session(config), model(std::make_shared<Net>(inner)) {
    at::set_num_threads(1);
    torch::manual_seed(seed);
    for (at::Tensor& parameter : model->parameters()) {
      const at::NoGradGuard no_grad;
      parameter.uniform_(-0.3, 0.3);
    }
    model->to(type);
    session.manage(*model);
  }

  void make_optimizer() {
    optimizer = std::make_unique<AdamW>(session, AdamW::Options(1e-2).weight_decay(0.1));
    optimizer->max_gradient_norm(0.5);
  }

  Losses train(int steps) {
    if (!optimizer) make_optimizer();
    Losses losses;
    for (int i = 0; i < steps; ++i) {
      const at::Tensor loss = model->forward(torch::randn({8, width}).to(model->scale.scalar_type()));
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.item<float>());
    }
    return losses;
  }

  Tensors copies() const {
    const at::NoGradGuard no_grad;
    Tensors all;
    for (const at::Tensor& tensor : model->parameters()) all.push_back(tensor.clone());
    for (const at::Tensor& tensor : model->buffers()) all.push_back(tensor.clone());
    return all;
  }

  Session session;
  std::shared_ptr<Net> model;
  std::unique_ptr<AdamW> optimizer;
};

void expect_same_bits(const Tensors& left, const Tensors& right) {
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(same_bits(left[i], right[i])) << "tensor " << i;
  }
}

CheckpointManifest manifest_in(const std::filesystem::path& folder) {
  return CheckpointReader(checkpoint_files(), folder).manifest();
}

std::filesystem::path data_file_in(const std::filesystem::path& folder) {
  return folder / manifest_in(folder).data_file;
}

class CheckpointSession : public ::testing::Test {
 protected:
  ~CheckpointSession() override { replace_checkpoint_files(nullptr); }

  /// Saves a model after three steps, and says what three more would have given.
  void save_after_three_steps(const Config& config, at::ScalarType type = at::kFloat) {
    World world(config, type);
    world.train(3);
    world.session.save(folder, {{"step", "3"}});
    later_losses = world.train(3);
    later_copies = world.copies();
  }

  TemporaryFolder scratch;
  TemporaryFolder nvme;
  std::filesystem::path folder = scratch.path() / "checkpoint";
  Losses later_losses;
  Tensors later_copies;
};

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

TEST_F(CheckpointSession, refuses_an_empty_name_and_notes_that_are_no_text_before_anything_is_written) {
  World world(on_host());
  EXPECT_THAT(message_of<ConfigError>([&] { world.session.save(""); }), HasSubstr("is empty"));
  EXPECT_THAT(message_of<ConfigError>([&] { world.session.load(""); }), HasSubstr("is empty"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                world.session.save(folder, {{"bytes", "\xff"}});
              }),
              HasSubstr("not UTF-8"));
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST_F(CheckpointSession, the_state_of_another_generator_is_refused) {
  {
    CheckpointRecord record;
    record.name = default_generator_name(at::kCPU);
    record.kind = CheckpointRecord::Kind::generator;
    record.dtype = "int16";  // of as many elements as the generator's state has bytes
    record.shape = {default_generator_state(at::kCPU).numel()};
    record.strides = {1};
    CheckpointWriter writer(checkpoint_files(), folder);
    writer.begin(record);
    writer.append(std::vector<std::byte>(2 * static_cast<std::size_t>(record.shape[0])));
    writer.commit({});
  }
  Session session(on_host());
  EXPECT_THAT(message_of<ConfigError>([&] { session.load(folder); }),
              HasSubstr("generator of 'cpu' is not in the session"));
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

TEST_F(CheckpointSession, another_model_is_refused_with_what_differs_and_nothing_changes) {
  save_after_three_steps(on_host());
  {
    World other(on_host(), at::kFloat, 5, /*inner=*/32);
    const Tensors before = other.copies();
    const std::string message = message_of<ConfigError>([&] { other.session.load(folder); });
    EXPECT_THAT(message, HasSubstr("parameter of 'down.weight' is float32 [60, 60] in the checkpoint and "
                                   "float32 [60, 32] in the session"));
    expect_same_bits(other.copies(), before);
  }
  {
    World other(on_host(), at::kBFloat16);
    EXPECT_THAT(message_of<ConfigError>([&] { other.session.load(folder); }),
                HasSubstr("is float32 [60, 60] in the checkpoint and bfloat16 [60, 60] in the session"));
  }
  Session session(on_host());
  torch::nn::Sequential other;
  for (int i = 0; i < 6; ++i) other->push_back(torch::nn::Linear(2, 2));
  session.manage(*other);
  const std::string message = message_of<ConfigError>([&] { session.load(folder); });
  EXPECT_THAT(message, HasSubstr("parameter of '0.weight' is not in the checkpoint"));
  EXPECT_THAT(message, HasSubstr("and 14 more"));
}

struct Turned : torch::nn::Module {
  explicit Turned(bool turn) {
    weight = register_parameter("weight", turn ? torch::zeros({4, 4}).t() : torch::zeros({4, 4}));
  }
  at::Tensor weight;
};

TEST_F(CheckpointSession, other_strides_are_told_as_such) {
  {
    Session session(on_host());
    Turned model(false);
    session.manage(model);
    session.save(folder);
  }
  Session session(on_host());
  Turned model(true);
  session.manage(model);
  EXPECT_THAT(message_of<ConfigError>([&] { session.load(folder); }), HasSubstr("of strides [4, 1] in the checkpoint"));
}

TEST_F(CheckpointSession, what_is_not_in_the_session_and_what_was_tied_is_told) {
  save_after_three_steps(on_host());
  Session session(on_host());
  torch::nn::Module model;
  model.register_module("up", torch::nn::Linear(width, width));
  session.manage(model);
  const std::string message = message_of<ConfigError>([&] { session.load(folder); });
  EXPECT_THAT(message, HasSubstr("'up.weight' is not in the checkpoint, where it is tied to 'tied'"));
  EXPECT_THAT(message, HasSubstr("buffer of 'norm.running_mean' is not in the session"));
}

TEST_F(CheckpointSession, corrupt_data_is_found_before_anything_changes) {
  save_after_three_steps(on_host());
  const auto data = data_file_in(folder);
  {
    std::fstream file(data, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(5);
    file.put('!');
  }
  World world(on_host());
  world.train(1);
  const Tensors before = world.copies();
  EXPECT_THAT(message_of<CorruptData>([&] { world.session.load(folder); }), HasSubstr(data.string() + " is corrupt"));
  expect_same_bits(world.copies(), before);
  world.train(1);
}

TEST_F(CheckpointSession, a_load_that_fails_midway_fails_every_use_until_one_succeeds) {
  save_after_three_steps(on_host());
  FaultInjectingFiles counting;
  {
    replace_checkpoint_files(&counting);
    World world(on_host());
    world.session.load(folder);
  }
  FaultInjectingFiles failing(FileFault::error, counting.reads() - 1, /*reads_only=*/true);
  replace_checkpoint_files(&failing);
  World world(on_host(), at::kFloat, 99);
  EXPECT_THROW(world.session.load(folder), IoError);
  ASSERT_TRUE(failing.fired());
  EXPECT_THROW(world.model->forward(torch::randn({8, width})), c10::Error);
  EXPECT_THROW(std::rethrow_exception(world.session.last_error()), IoError);
  world.make_optimizer();
  for (const std::function<void()>& use : std::vector<std::function<void()>>{
           [&] { world.optimizer->step(); },
           [&] { auto view = world.session.gather(*world.model, Access::read); },
           [&] { world.session.for_each_parameter([](const std::string&, at::Tensor&) {}); },
           [&] { world.session.save(folder); },
           [&] { world.session.manage(*world.model); },
       }) {
    EXPECT_THAT(message_of<IoError>(use), HasSubstr("injected"));
  }
  world.session.load(folder);
  EXPECT_EQ(world.train(3), later_losses);
}

TEST_F(CheckpointSession, a_read_that_fails_while_all_is_checked_changes_nothing) {
  save_after_three_steps(on_host());
  FaultInjectingFiles failing(FileFault::error, 2, /*reads_only=*/true);
  replace_checkpoint_files(&failing);
  World world(on_host());
  const Tensors before = world.copies();
  EXPECT_THROW(world.session.load(folder), IoError);
  ASSERT_TRUE(failing.fired());
  expect_same_bits(world.copies(), before);
}

TEST_F(CheckpointSession, a_save_that_fails_leaves_the_run_and_the_checkpoint_before) {
  World world(on_host());
  world.train(3);
  world.session.save(folder);
  const Losses later = world.train(1);
  FaultInjectingFiles failing(FileFault::error, 20);
  replace_checkpoint_files(&failing);
  EXPECT_THROW(world.session.save(folder), IoError);
  ASSERT_TRUE(failing.fired());
  replace_checkpoint_files(nullptr);
  world.train(1);
  world.session.load(folder);
  EXPECT_EQ(world.train(1), later);
}

TEST_F(CheckpointSession, a_drive_that_fails_while_chunks_are_read_leaves_the_checkpoint_before) {
  std::atomic<bool> is_failing{false};
  decorate_io_engines([&](std::unique_ptr<IoEngine> plain) {
    auto decorated = std::make_unique<FaultInjectingEngine>(std::move(plain));
    decorated->inject({.fault = Fault::io_error,
                       .direction = IoOperation::Direction::read,
                       .when = [&](const IoOperation&) { return is_failing.load(); }});
    return decorated;
  });
  World world(on_nvme(nvme));
  decorate_io_engines(nullptr);
  torch::nn::Sequential more;  // than device and host hold together
  for (int i = 0; i < 12; ++i) more->push_back(torch::nn::Linear(width, width));
  world.session.manage(*more);
  world.train(3);
  world.session.save(folder);
  const auto data = data_file_in(folder);
  const Losses later = world.train(1);
  world.session.synchronize();
  is_failing = true;
  EXPECT_THROW(world.session.save(folder), IoError);
  is_failing = false;
  EXPECT_EQ(data_file_in(folder), data);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 3) << "it left what it had written";
  world.session.load(folder);
  EXPECT_EQ(world.train(1), later);
}

TEST_F(CheckpointSession, states_that_have_no_room_are_refused_before_anything_changes) {
  save_after_three_steps(on_host());
  Config config = on_host();
  config.host.memory = 10 * (16 << 10);
  config.timeline.memory = 0;
  const Config::Shares host_only{.device = 0, .host = 1, .nvme = 0};
  config.placement.parameters = config.placement.gradients = config.placement.optimizer = host_only;
  World world(config, at::kFloat, 99);
  const Tensors before = world.copies();
  EXPECT_THAT(message_of<OutOfMemory>([&] { world.session.load(folder); }), HasSubstr("host.memory"));
  expect_same_bits(world.copies(), before);
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

TEST_F(CheckpointSession, neither_saves_nor_loads_while_anything_is_gathered) {
  World world(on_host());
  world.session.save(folder);
  const auto view = world.session.gather(*world.model, Access::read);
  EXPECT_THAT(message_of<LogicError>([&] { world.session.save(folder); }), HasSubstr("tensors are gathered"));
  EXPECT_THAT(message_of<LogicError>([&] { world.session.load(folder); }), HasSubstr("tensors are gathered"));
}

TEST_F(CheckpointSession, buffers_that_cannot_be_saved_are_named) {
  {
    Session session(on_host());
    torch::nn::Linear sparse(2, 2);
    sparse->register_buffer("mask", torch::eye(2).to_sparse());
    session.manage(*sparse);
    EXPECT_THAT(message_of<LogicError>([&] { session.save(folder); }), HasSubstr("buffer 'mask' cannot be saved"));
  }
  Session session(on_host());
  torch::nn::Linear tiny(2, 2);
  tiny->register_buffer("tiny", torch::zeros({2}).to(at::kFloat8_e5m2));
  session.manage(*tiny);
  EXPECT_THAT(message_of<LogicError>([&] { session.save(folder); }), HasSubstr("no name for the type Float8_e5m2"));
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
