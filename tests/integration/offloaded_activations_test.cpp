// Activations that rest on the host or on NVMe: the bits of plain LibTorch, within budgets that do not hold them, and
// what goes wrong told as LibTorch tells it.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "integration/program_memory.h"
#include "offload/page_blocks.h"
#include "tests/integration/small_device.h"
#include "tests/integration/small_gpt.h"
#include "tests/offload/resource_limit.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

constexpr std::uint64_t MiB = 1 << 20;
const std::uint64_t block_of_a_mib = PageBlocks::rounded(block_bytes(MiB));

/// What trains: a module, and a loss that is a function of it.
struct Program {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
};
using MakeProgram = std::function<Program()>;

struct Outcome {
  std::vector<double> losses;
  Tensors parameters;
};

/// Trains for some steps; `session` null: with plain LibTorch.
Outcome train(const MakeProgram& make, Session* session, int steps = 4) {
  torch::manual_seed(3);
  Program program = make();
  std::optional<AdamW> optimizer;
  if (session != nullptr) {
    session->manage(*program.module);
    optimizer.emplace(*session, torch::optim::AdamWOptions(1e-2));
  } else {
    optimizer.emplace(program.module->parameters(), torch::optim::AdamWOptions(1e-2));
  }
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = program.loss();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    outcome.losses.push_back(loss.item<double>());
  }
  const auto keep = [&](const at::Tensor& parameter) { outcome.parameters.push_back(parameter.detach().clone()); };
  if (session != nullptr) {
    session->for_each_parameter([&](const std::string&, at::Tensor& parameter) { keep(parameter); });
  } else {
    for (const at::Tensor& parameter : program.module->parameters()) {
      keep(parameter);
    }
  }
  return outcome;
}

/// Layers whose outputs take a MiB each, all of them saved.
Program wide_mlp(int depth) {
  torch::nn::Sequential layers;
  for (int i = 0; i < depth; ++i) {
    layers->push_back(torch::nn::Linear(64, 64));
    layers->push_back(torch::nn::Tanh());
  }
  const at::Tensor input = torch::randn({4096, 64});
  return {layers.ptr(), [layers, input]() mutable { return layers->forward(input).square().mean(); }};
}

Program convolutions() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(i == 0 ? 3 : 8, 8, 3).padding(1)));
    layers->push_back(torch::nn::BatchNorm2d(8));
    layers->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)));
  }
  const at::Tensor input = torch::randn({8, 3, 64, 64});
  return {layers.ptr(), [layers, input]() mutable { return layers->forward(input).square().mean(); }};
}

Program lstm() {
  torch::nn::LSTM layers(torch::nn::LSTMOptions(64, 128).num_layers(5));
  const at::Tensor input = torch::randn({24, 64, 64});
  return {layers.ptr(), [layers, input]() mutable { return std::get<0>(layers->forward(input)).square().mean(); }};
}

Program gpt() {
  const SmallGptShape shape{.layers = 8, .sequence = 64, .dropout = 0.1};
  auto model = std::make_shared<SmallGpt>(shape);
  const at::Tensor tokens = torch::randint(64, {32, 65});
  return {model, [model, tokens] { return model->forward(tokens.slice(1, 0, 64), tokens.slice(1, 1, 65)); }};
}

class OffloadedActivations : public SmallDeviceTest {
 protected:
  /// The same bits as plain LibTorch, within a device that does not hold what is saved.
  void expect_unmanaged_bits(const MakeProgram& make, std::uint64_t device_memory) {
    const Outcome expected = train(make, nullptr);
    {
      Config kept = config(device_memory);
      kept.placement.activations = "keep";
      Session session(kept);
      EXPECT_THROW(train(make, &session), c10::Error) << "the device holds all activations: the test proves little";
    }
    Session session(config(device_memory));
    const Outcome managed = train(make, &session);
    EXPECT_EQ(managed.losses, expected.losses);
    ASSERT_EQ(managed.parameters.size(), expected.parameters.size());
    for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(managed.parameters[i], expected.parameters[i])) << "parameter " << i;
    }
    const MemoryUsage usage = session.memory_usage();
    for (const Tier tier : all_tiers) {
      EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
    }
    EXPECT_GT(usage.moved(Link::device_to_host, Kind::activation), 0u);
    EXPECT_GT(usage.moved(Link::host_to_device, Kind::activation), 0u);
  }

  /// Some operations in a session whose device does not hold their activations.
  std::unique_ptr<Session> small_session() const { return std::make_unique<Session>(config()); }
};

}  // namespace

TEST_P(OffloadedActivations, of_five_times_the_device_give_the_bits_of_unmanaged) {
  expect_unmanaged_bits([] { return wide_mlp(50); }, device_bytes);
}

TEST_P(OffloadedActivations, of_a_convolutional_net_give_the_bits_of_unmanaged) {
  expect_unmanaged_bits(convolutions, 12 * MiB);
}

TEST_P(OffloadedActivations, of_an_lstm_give_the_bits_of_unmanaged) { expect_unmanaged_bits(lstm, 40 * MiB); }

TEST_P(OffloadedActivations, of_a_gpt_with_dropout_give_the_bits_of_unmanaged) { expect_unmanaged_bits(gpt, 20 * MiB); }

TEST_P(OffloadedActivations, serve_a_second_backward_through_a_retained_graph) {
  const auto session = small_session();
  const at::Tensor x = wide_input();
  const at::Tensor loss = chain(x);
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor first = x.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), first + first));
}

TEST_P(OffloadedActivations, serve_gradients_of_gradients) {
  const auto second_gradient = [] {
    const at::Tensor x = torch::linspace(-1, 1, 64 << 10).requires_grad_();
    const at::Tensor gradient = torch::autograd::grad({chain(x)}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({gradient.square().sum()}, {x})[0].clone();
  };
  const at::Tensor expected = second_gradient();
  const auto session = small_session();
  EXPECT_TRUE(at::equal(second_gradient(), expected));
}

TEST_P(OffloadedActivations, changed_in_place_are_refused_as_LibTorch_does) {
  const auto session = small_session();
  const at::Tensor x = wide_input();
  at::Tensor y = x.exp();  // saves what it returns
  const at::Tensor loss = y.sum();
  y.add_(1);
  try {
    loss.backward();
    FAIL() << "the change was not seen";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
  }
}

TEST_P(OffloadedActivations, views_of_one_storage_leave_once) {
  const auto session = small_session();
  const at::Tensor x = wide_input();
  at::Tensor y = x.tanh();
  at::Tensor loss = (y.view({512, 512}) * y.view({512, 512}).t()).sum();
  y = at::Tensor();
  loss = loss + x.sum();  // ops between which it leaves
  EXPECT_EQ(session->memory_usage().now(Tier::device, Kind::activation), block_of_a_mib);
  loss.backward();
}

TEST_P(OffloadedActivations, leave_in_the_memory_where_they_are) {
  const auto session = small_session();
  const at::Tensor x = wide_input();
  at::Tensor y = x.tanh();
  at::Tensor loss = y.sum();
  const std::uint64_t rest = session->memory_usage().capacity(Tier::device) - session->memory_usage().now(Tier::device);
  const at::Tensor rest_of_the_device = torch::empty(static_cast<std::int64_t>(rest - MiB / 4), at::kByte);
  const void* const place = y.data_ptr();
  y = at::Tensor();
  loss = loss + 1;  // before which it leaves, and there is no room for a copy of it
  EXPECT_EQ(session->memory_usage().now(Tier::device, Kind::activation), block_of_a_mib);
  const auto tanh = loss.grad_fn()->next_edge(0).function->next_edge(0).function;
  auto& saved = dynamic_cast<torch::autograd::generated::TanhBackward0&>(*tanh).result_;
  EXPECT_EQ(saved.unpack(tanh).data_ptr(), place);
}

TEST_P(OffloadedActivations, leave_the_device_with_a_graph_that_nobody_runs_backward) {
  const auto session = small_session();
  const MemoryUsage before = session->memory_usage();
  {
    const at::Tensor loss = chain(wide_input());
    EXPECT_GT(session->memory_usage().now(Tier::device, Kind::activation), 0u);
    EXPECT_GT(session->memory_usage().now(home(), Kind::activation), 0u);
  }
  // What is on its way to its home leaves when it is there, and room for the program is waited for.
  constexpr std::int64_t nearly_all = device_bytes - MiB / 2;
  EXPECT_EQ(torch::empty(nearly_all, at::kByte).numel(), nearly_all);
  EXPECT_EQ(session->memory_usage().now(Tier::device, Kind::activation), 0u);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto kept = [&](Tier tier) { return session->memory_usage().now(tier) - before.now(tier); };
  while (kept(Tier::host) + kept(Tier::nvme) > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const Tier tier : all_tiers) {
    EXPECT_EQ(kept(tier), 0u) << name_of(tier);
  }
}

TEST_P(OffloadedActivations, survive_an_exception_in_backward) {
  const auto session = small_session();
  const at::Tensor x = wide_input();
  at::Tensor y = x.tanh().tanh();
  y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("enough"); });
  EXPECT_THROW(chain(y).backward(), std::runtime_error);
  y = at::Tensor();
  chain(x).backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_P(OffloadedActivations, are_ordinary_after_the_session) {
  const at::Tensor x = wide_input();
  chain(x).backward();
  const at::Tensor expected = x.grad().clone();
  x.mutable_grad() = at::Tensor();
  auto session = small_session();
  const at::Tensor loss = chain(x);
  ASSERT_GT(session->memory_usage().now(Tier::nvme) + session->memory_usage().now(Tier::host, Kind::activation), 0u);
  session.reset();
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), expected));
}

TEST_P(OffloadedActivations, that_the_machine_cannot_hold_end_with_their_session) {
  Config wide = config(160 * MiB);
  wide.host.memory = 96 * MiB;
  auto session = std::make_unique<Session>(wide);
  const at::Tensor x = torch::zeros({16 << 20}).requires_grad_();  // 64 MiB
  at::Tensor y = x.tanh();
  const auto tanh = y.grad_fn();
  const at::Tensor loss = y.sum();
  y = at::Tensor();
  torch::ones({1}).add_(1);  // an op before which it leaves
  auto& saved = dynamic_cast<torch::autograd::generated::TanhBackward0&>(*tanh).result_;
  const at::Tensor handed_out = saved.unpack(tanh);
  EXPECT_EQ(handed_out[0].item<float>(), 0);
  {
    const ResourceLimit limit(RLIMIT_AS, bytes_in_status("VmSize") + 16 * MiB);
    session.reset();
  }
  EXPECT_THROW(handed_out[0].item<float>(), c10::Error);
  EXPECT_THROW(loss.backward(), std::exception);
}

TEST_P(OffloadedActivations, of_a_session_that_has_ended_do_not_leave_in_the_next) {
  const at::Tensor x = wide_input();
  x.tanh().sum().backward();
  const at::Tensor expected = x.grad().clone();
  x.mutable_grad() = at::Tensor();
  auto session = small_session();
  at::Tensor y = x.tanh();
  const at::Tensor loss = y.sum();
  session.reset();
  y = at::Tensor();
  session = small_session();
  chain(wide_input()).backward();
  loss.backward();
  session.reset();
  EXPECT_TRUE(at::equal(x.grad(), expected));
}

TEST_P(OffloadedActivations, without_room_to_rest_stay_on_the_device_and_last_error_says_why) {
  Config small = config(32 * MiB);
  small.host.memory = 3 * MiB;
  small.nvme.memory = 2 * MiB;
  Session session(small);
  const at::Tensor x = wide_input();
  chain(x).backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_THROW(std::rethrow_exception(session.last_error()), OutOfMemory);
}

INSTANTIATE_TEST_SUITE_P(Tiers, OffloadedActivations, ::testing::Values("host", "nvme"),
                         [](const auto& tier) { return tier.param; });

}  // namespace terrace::testing
