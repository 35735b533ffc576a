// What is not a checkpoint of this session changes nothing, nor does a drive or a file that fails.

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_tensors.h"
#include "integration/checkpoint_writer.h"
#include "offload/choose_engine.h"
#include "tests/integration/checkpoint_session_fixture.h"
#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_gpt.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using World = CheckpointWorld;

constexpr std::int64_t width = Net::width;

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

}  // namespace
}  // namespace terrace::testing
