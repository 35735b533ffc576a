// Recomputing a block changes memory and time, and nothing else: the same bits, and the same errors.

#include <functional>
#include <stdexcept>
#include <thread>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "integration/saved_tensors.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t width = 16;

Config planned(const char* activations) {
  Config config;
  config.device.memory = 16 << 20;
  config.device.chunks = 1 << 20;
  config.host.memory = 16 << 20;
  config.placement.chunk = 16 << 10;
  config.placement.activations = activations;
  config.log.level = LogLevel::error;
  return config;
}

/// What a program that uses blocks runs in: no session, or one that keeps or recomputes activations.
class World {
 public:
  explicit World(const char* activations = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (activations != nullptr) {
      session_.emplace(planned(activations));
    }
  }

  torch::nn::Linear linear(std::int64_t in = width, std::int64_t out = width) {
    torch::nn::Linear made(in, out);
    manage(*made);
    return made;
  }
  void manage(torch::nn::Module& module) {
    if (session_) {
      session_->manage(module);
    }
  }
  std::optional<Session>& session() { return session_; }

  /// Runs of blocks' functions, where they count them.
  int runs = 0;

 private:
  std::optional<Session> session_;
};

/// Runs `program`, which returns what must not depend on the plan, in each world. When recomputed, functions ran
/// `again` more times.
void expect_the_same_everywhere(int again, const std::function<Tensors(World&)>& program) {
  Tensors expected;
  int expected_runs = 0;
  {
    World world;
    expected = program(world);
    expected_runs = world.runs;
  }
  for (const char* activations : {"keep", "auto", "recompute"}) {
    SCOPED_TRACE(activations);
    World world(activations);
    const Tensors found = program(world);
    EXPECT_EQ(world.runs, expected_runs + (std::string(activations) == "recompute" ? again : 0));
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << "result " << i;
      if (found[i].defined()) {
        EXPECT_TRUE(same_bits(found[i], expected[i])) << "result " << i;
        EXPECT_NE(found[i].abs().sum().item<double>(), 0) << "result " << i << " would prove little";
      }
    }
  }
}

at::Tensor copy_of(const at::Tensor& tensor) { return tensor.detach().clone(); }

at::Tensor input(std::int64_t rows = 4) { return torch::randn({rows, width}).requires_grad_(); }

/// A world that recomputes, and what its tests share.
class Recompute : public ::testing::Test {
 protected:
  World world{"recompute"};
  torch::nn::Linear linear = world.linear();
  at::Tensor x = input();

  /// As a block: a linear layer and an activation.
  at::Tensor layer() {
    return block(
        [this](const at::Tensor& value) {
          ++world.runs;
          return torch::tanh(linear(value));
        },
        x);
  }
};

/// What `call` throws.
template <class Expected, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    if constexpr (std::is_base_of_v<c10::Error, Expected>) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

constexpr const char* changed_in_place =
    "one of the variables needed for gradient computation has been modified by an inplace operation: [CPUFloatType [";

/// Square that keeps its input as an autograd function of the program's own.
struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * context->get_saved_variables()[0] * gradients[0]};
  }
};

struct CountHook : torch::autograd::PostAccumulateGradHook {
  explicit CountHook(int& count_) : count(count_) {}
  void operator()(const torch::autograd::Variable& /*tensor*/) override { ++count; }
  int& count;
};

}  // namespace

class TrainedGpt : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(TrainedGpt, has_the_same_losses_and_parameters_as_without_a_session) {
  TrainingOptions options;
  options.type = GetParam();
  options.steps = 5;
  options.shape.dropout = 0.2;
  const TrainingResult expected = train_small_gpt(options);
  const TrainingResult found = train_small_gpt(options, planned("recompute"));
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  ASSERT_EQ(found.parameters.size(), expected.parameters.size());
  for (std::size_t i = 0; i < found.parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(found.parameters[i], expected.parameters[i])) << "parameter " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, TrainedGpt, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& type) { return std::string(c10::toString(type.param)); });

TEST(Block, draws_the_same_random_numbers_again_and_leaves_the_generator_where_it_was) {
  expect_the_same_everywhere(2, [](World& world) {
    auto linear = world.linear();
    at::Tensor x = input();
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      const at::Tensor y = block(
          [&](const at::Tensor& value) {
            ++world.runs;
            // Few normal numbers are made in pairs, of which one is left over.
            return torch::dropout(linear(value), 0.5, true) * torch::randn({1}) * torch::randn({1}, torch::kDouble);
          },
          x);
      results.push_back(torch::randn({1}));
      y.pow(2).sum().backward();
      results.insert(results.end(), {copy_of(y), copy_of(linear->weight.grad()), copy_of(x.grad()), torch::randn({1}),
                                     torch::randn({1}, torch::kDouble), torch::randn({40})});
    }
    return results;
  });
}

TEST(Block, may_be_used_several_times_with_the_same_weights_whose_hooks_run_once) {
  expect_the_same_everywhere(4, [](World& world) {
    torch::nn::Linear linear(width, width);
    int fired = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(linear->weight, std::make_unique<CountHook>(fired));
    world.manage(*linear);
    const at::Tensor x = input();
    at::Tensor y = x;
    for (int i = 0; i < 4; ++i) {
      y = block(
          [&](const at::Tensor& value) {
            ++world.runs;
            return value + torch::gelu(linear(value));
          },
          y);
    }
    y.pow(2).mean().backward();
    EXPECT_EQ(fired, 1);
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(linear->weight.grad()), copy_of(linear->bias.grad())};
  });
}

TEST(Block, within_a_block_is_part_of_it) {
  expect_the_same_everywhere(3, [](World& world) {
    auto outer = world.linear();
    auto inner = world.linear();
    const at::Tensor x = input();
    const auto one_inner = [&](const at::Tensor& value) {
      ++world.runs;
      return torch::dropout(torch::tanh(inner(value)), 0.2, true);
    };
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          const at::Tensor first = block(one_inner, torch::tanh(outer(value)));
          return first * block(one_inner, outer(first));
        },
        x);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(outer->weight.grad()), copy_of(inner->weight.grad())};
  });
}

struct Halves {
  at::Tensor left, right;
};

TEST(Block, takes_and_returns_anything) {
  expect_the_same_everywhere(1, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const Tensors list{input(), input()};
    const std::pair<at::Tensor, std::optional<at::Tensor>> pair{input(), input()};
    const Halves halves{input(), input()};
    const at::Tensor mask = torch::randint(2, {4, width}, torch::kBool);
    const at::Tensor constant = torch::randn({4, width});
    int power = 2;
    const auto [product, sums, rest, text] = block(
        [&](const at::Tensor& a, Tensors b, const auto& c, const Halves& d, at::Tensor e, const at::Tensor& f, int& n,
            const char* name, const std::optional<at::Tensor>& nothing, const at::Tensor& undefined) {
          ++world.runs;
          EXPECT_FALSE(nothing.has_value() || undefined.defined());
          b[0] = b[0] * a;
          e = e.logical_not();
          return std::make_tuple(a * linear(f) * e, Tensors{b[0].pow(n), b[1] * c.first.exp()},
                                 Halves{d.left.sin() * c.second->cos(), d.right * f}, std::string(name));
        },
        x, list, pair, halves, mask, constant, power, "name", std::optional<at::Tensor>(), at::Tensor());
    EXPECT_EQ(text, "name");
    (product.sum() + sums[0].sum() + sums[1].sum() + rest.left.sum() + rest.right.sum()).backward();
    EXPECT_FALSE(constant.grad().defined());
    return Tensors{copy_of(product),
                   copy_of(sums[0]),
                   copy_of(sums[1]),
                   copy_of(rest.left),
                   copy_of(rest.right),
                   copy_of(x.grad()),
                   copy_of(list[0].grad()),
                   copy_of(list[1].grad()),
                   copy_of(pair.first.grad()),
                   copy_of(pair.second->grad()),
                   copy_of(halves.left.grad()),
                   copy_of(halves.right.grad()),
                   copy_of(linear->weight.grad())};
  });
}

TEST(Block, may_return_nothing_and_take_nothing) {
  expect_the_same_everywhere(1, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    at::Tensor y;
    block([&] {
      ++world.runs;
      const at::Tensor made = torch::tanh(linear(x));
      y = y.defined() ? y : made;
    });
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(linear->weight.grad()), copy_of(x.grad())};
  });
}

TEST(Block, runs_again_for_each_backward_through_a_retained_graph) {
  expect_the_same_everywhere(2, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          return torch::dropout(torch::tanh(linear(value)), 0.2, true);
        },
        x);
    y.sum().backward({}, /*retain_graph=*/true);
    const at::Tensor once = copy_of(x.grad());
    y.pow(2).sum().backward();
    return Tensors{once, copy_of(x.grad()), copy_of(linear->weight.grad())};
  });
}

TEST(Block, gives_gradients_of_gradients) {
  expect_the_same_everywhere(2, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor hidden = x * 2;  // the block's input is not a leaf
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          return torch::sigmoid(linear(torch::tanh(value)) * value);
        },
        hidden);
    const at::Tensor gradient =
        torch::autograd::grad({y.pow(3).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const at::Tensor penalty = gradient.pow(2).sum();
    penalty.backward();
    return Tensors{copy_of(gradient), copy_of(x.grad()), copy_of(linear->weight.grad()), copy_of(linear->bias.grad())};
  });
}

TEST(Block, may_contain_a_backward_and_functions_of_the_programs_own) {
  expect_the_same_everywhere(2, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          const at::Tensor energy = Square::apply(torch::tanh(linear(value))).sum();
          return torch::autograd::grad({energy}, {value}, {}, true, /*create_graph=*/true)[0];
        },
        x);
    y.pow(2).sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(linear->weight.grad())};
  });
}

TEST(Block, may_change_its_own_tensors_in_place) {
  expect_the_same_everywhere(1, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          at::Tensor hidden = linear(value);  // does not keep its result
          hidden.mul_(2);
          hidden.view({-1}).slice(0, 0, 8).mul_(3);
          return hidden.tanh_().sin();
        },
        x);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(linear->weight.grad())};
  });
}

namespace {

/// Batch norm, whose statistics change with no declared write, and a buffer that is written and then read.
struct Normalizing : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    scale.mul_(1.5);
    return torch::tanh(norm(x)) * scale.clone() + torch::tanh(norm(x + 1));
  }
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(width))};
  at::Tensor scale = register_buffer("scale", torch::ones({1}));
};

}  // namespace

TEST(Block, changes_buffers_once_and_sees_them_as_they_were) {
  expect_the_same_everywhere(3, [](World& world) {
    Normalizing model;
    world.manage(model);
    const at::Tensor x = input();
    const auto forward = [&](const at::Tensor& value) {
      ++world.runs;
      return model.forward(value);
    };
    const at::Tensor first = block(forward, x);
    const at::Tensor second = block(forward, x * 2);
    first.pow(2).sum().backward();
    second.pow(2).sum().backward();
    block(forward, x).sum().backward();
    Tensors results{copy_of(first), copy_of(second), copy_of(x.grad())};
    for (const at::Tensor& buffer : model.buffers()) {
      results.push_back(copy_of(buffer));
    }
    return results;
  });
}

TEST(Block, runs_again_under_the_autocast_of_its_first_run) {
  expect_the_same_everywhere(2, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    Tensors results;
    for (int step = 0; step < 2; ++step) {
      at::Tensor y;
      {
        at::autocast::set_autocast_enabled(at::kCPU, true);
        at::autocast::increment_nesting();
        y = block(
            [&](const at::Tensor& value) {
              ++world.runs;
              return torch::tanh(linear(torch::tanh(linear(value))));
            },
            x);
        at::autocast::decrement_nesting();
        at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
      }
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      y.to(torch::kFloat).pow(2).sum().backward();
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      results.insert(results.end(), {copy_of(y), copy_of(x.grad()), copy_of(linear->weight.grad())});
      const torch::NoGradGuard no_grad;  // a stale cast would show in the second step
      linear->weight.sub_(linear->weight.grad());
      linear->weight.mutable_grad().reset();
    }
    return results;
  });
}

TEST(Block, may_be_unpacked_on_another_thread) {
  expect_the_same_everywhere(1, [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          return torch::dropout(torch::tanh(linear(value)), 0.3, true);
        },
        x);
    const at::Tensor loss = y.pow(2).sum();
    std::thread([&] { loss.backward(); }).join();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(linear->weight.grad())};
  });
}

TEST(Block, may_outlive_its_session) {
  const auto gradients = [](World& world) {
    auto linear = world.linear();
    const at::Tensor x = input();
    const at::Tensor y = block([linear](const at::Tensor& value) mutable { return torch::tanh(linear(value)); }, x);
    world.session().reset();
    y.sum().backward();
    return Tensors{copy_of(x.grad()), copy_of(linear->weight.grad())};
  };
  World plain;
  World recomputing("recompute");
  torch::manual_seed(5);
  const Tensors found = gradients(recomputing);
  torch::manual_seed(5);
  const Tensors expected = gradients(plain);
  EXPECT_TRUE(same_bits(found[0], expected[0]));
  EXPECT_TRUE(same_bits(found[1], expected[1]));
}

TEST(Block, is_called_straight_through_where_nothing_is_recomputed) {
  const at::Tensor x = input();
  at::Tensor seen;
  const auto function = [&](at::Tensor&& value) {
    seen = value;
    EXPECT_EQ(SavedTensorScope::current(), nullptr);
    return value * value;
  };
  const auto expect_straight_through = [&] {
    const at::Tensor y = block(function, at::Tensor(x));
    EXPECT_TRUE(seen.is_same(x));
    EXPECT_EQ(y.requires_grad(), at::GradMode::is_enabled());
  };
  expect_straight_through();
  for (const char* activations : {"auto", "keep"}) {
    const World world(activations);
    expect_straight_through();
  }
  {
    const World world("recompute");
    const torch::NoGradGuard no_grad;
    expect_straight_through();
  }
  expect_straight_through();  // the session has ended
}

TEST(Block, takes_function_objects_that_can_only_be_moved) {
  World world("recompute");
  const at::Tensor x = input();
  auto weight = std::make_unique<at::Tensor>(input());
  const at::Tensor y =
      block([held = std::move(weight)](const at::Tensor& value) { return torch::tanh(value * *held); }, x);
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

namespace {

/// Eight layers of a wide MLP: the highest use of the device in one step, and what is left afterwards.
std::uint64_t peak_of_a_deep_mlp(const char* activations) {
  World world(activations);
  std::vector<torch::nn::Linear> layers;
  for (int i = 0; i < 8; ++i) {
    layers.push_back(world.linear());
  }
  const std::uint64_t before = world.session()->memory_usage().now(Tier::device, Kind::other);
  {
    at::Tensor x = torch::randn({512, width});
    for (auto& layer : layers) {
      x = block(
          [layer](const at::Tensor& value) mutable {
            at::Tensor y = layer(value);
            for (int i = 0; i < 6; ++i) {
              y = torch::tanh(y).exp();
            }
            return y;
          },
          x);
    }
    x.sum().backward();
  }
  const MemoryUsage usage = world.session()->memory_usage();
  EXPECT_EQ(usage.now(Tier::device, Kind::other), before) << "something is still held";
  return usage.peak(Tier::device, Kind::other);
}

}  // namespace

TEST(Block, lowers_the_peak_of_device_memory) {
  constexpr std::uint64_t activation = 512 * width * sizeof(float);
  const std::uint64_t kept = peak_of_a_deep_mlp("keep");
  const std::uint64_t recomputed = peak_of_a_deep_mlp("recompute");
  EXPECT_GT(kept, 8 * 12 * activation);
  EXPECT_LT(recomputed, (8 + 12 + 8) * activation);  // the inputs of blocks, one block's own, and what ops need
}

TEST_F(Recompute, drops_what_a_partial_backward_leaves) {
  const auto used = [&] { return world.session()->memory_usage().now(Tier::device, Kind::other); };
  at::Tensor scale = torch::randn({512, width}).requires_grad_();
  x = torch::randn({512, width}).requires_grad_();
  const auto parts =
      block([&](const at::Tensor& a, const at::Tensor& b) { return std::pair(a.exp(), b.sin().cos()); }, x, scale);
  const at::Tensor loss = parts.first.sum() + parts.second.sum();
  const std::uint64_t before = used();
  const auto gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
  EXPECT_LE(used(), before + gradient[0].nbytes() + 4096);
}

TEST_F(Recompute, fails_as_libtorch_does_if_an_input_was_changed_in_place) {
  const auto text_of = [&] {
    x = torch::randn({4, width});
    const at::Tensor y = layer();
    x.add_(1);
    return error_of<c10::Error>([&] { y.sum().backward(); });
  };
  const std::string text = text_of();
  EXPECT_THAT(text, StartsWith(changed_in_place));
  EXPECT_EQ(world.runs, 1);
  world.session().reset();
  EXPECT_EQ(text_of(), text);
}

TEST_F(Recompute, fails_as_libtorch_does_if_its_function_changes_in_place_what_was_saved) {
  const auto text_of = [&] {
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          at::Tensor hidden = torch::tanh(linear(value));
          hidden.mul_(2);
          return hidden.sin();
        },
        x);
    return error_of<c10::Error>([&] { y.sum().backward(); });
  };
  const std::string text = text_of();
  EXPECT_THAT(text, AllOf(StartsWith(changed_in_place), HasSubstr("which is output 0 of TanhBackward0")));
  world.session().reset();
  EXPECT_EQ(text_of(), text);
}

TEST_F(Recompute, fails_if_a_parameter_was_changed_in_place) {
  const at::Tensor y = layer();
  {
    const torch::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  EXPECT_THAT(error_of<c10::Error>([&] { y.sum().backward(); }),
              AllOf(StartsWith(changed_in_place), HasSubstr("[16, 16]] is at version")));
  EXPECT_EQ(world.runs, 1);
}

TEST_F(Recompute, fails_as_libtorch_does_if_its_result_was_changed_in_place) {
  const auto text_of = [&] {
    const at::Tensor y = layer();
    y.mul_(2);
    return error_of<c10::Error>([&] { y.sum().backward(); });
  };
  const std::string text = text_of();
  EXPECT_THAT(text, AllOf(StartsWith(changed_in_place), HasSubstr("output 0 of TanhBackward0")));
  world.session().reset();
  EXPECT_EQ(text_of(), text);
}

TEST_F(Recompute, fails_if_a_parameter_that_is_read_but_not_saved_was_changed_in_place) {
  const at::Tensor y = layer();
  {
    const torch::NoGradGuard no_grad;
    linear->bias.add_(1);
  }
  EXPECT_THAT(
      error_of<c10::Error>([&] { y.sum().backward(); }),
      AllOf(StartsWith(changed_in_place), HasSubstr("[16]] is at version 2; expected version 1 instead. Hint")));
  EXPECT_EQ(world.runs, 1);
}

TEST_F(Recompute, fails_if_an_input_that_is_read_but_not_saved_was_changed_in_place) {
  const at::Tensor shift = torch::randn({4, width});
  const at::Tensor y = block([](const at::Tensor& a, const Tensors& b) { return (a + b[0]).sin(); }, x, Tensors{shift});
  shift.add_(1);
  EXPECT_THAT(error_of<c10::Error>([&] { y.sum().backward(); }), StartsWith(changed_in_place));
}

TEST_F(Recompute, fails_if_its_function_changes_an_input_in_place) {
  x = input() * 1;
  const at::Tensor y = block([](at::Tensor value) { return value.add_(1).sin(); }, x);
  EXPECT_THAT(error_of<c10::Error>([&] { y.sum().backward(); }), StartsWith(changed_in_place));
}

TEST_F(Recompute, ends_with_its_result_where_its_function_changes_an_input_in_place) {
  auto token = std::make_shared<int>();
  const std::weak_ptr<int> held = token;
  {
    x = input() * 1;
    const at::Tensor y = block([token = std::move(token)](at::Tensor value) { return value.add_(1).sin(); }, x);
    x = at::Tensor();
    EXPECT_FALSE(held.expired());
  }
  EXPECT_TRUE(held.expired());
}

TEST_F(Recompute, fails_if_the_optimizer_stepped_since_the_forward) {
  AdamW optimizer(*world.session(), AdamW::Options(1e-2));
  layer().sum().backward();
  const at::Tensor y = layer();
  optimizer.step();
  EXPECT_THAT(error_of<c10::Error>([&] { y.sum().backward(); }), StartsWith(changed_in_place));
  optimizer.zero_grad();
  EXPECT_NO_THROW(layer().sum().backward());
}

TEST_F(Recompute, passes_on_what_its_function_throws_in_forward) {
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const auto refuse = [&](const at::Tensor& value) -> at::Tensor {
    const at::Tensor saved = torch::tanh(linear(value));
    throw Refused("in forward");
  };
  EXPECT_EQ(error_of<Refused>([&] { block(refuse, x); }), "in forward");
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
  EXPECT_EQ(RecomputedBlock::recording(), nullptr);
  layer().sum().backward();
  EXPECT_EQ(world.runs, 2);
}

TEST_F(Recompute, passes_on_what_its_function_throws_when_it_runs_again) {
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const at::Tensor y = block(
      [&](const at::Tensor& value) {
        const at::Tensor result = torch::dropout(torch::tanh(linear(value)), 0.5, true);
        if (++world.runs == 2) {
          throw Refused("in backward");
        }
        return result;
      },
      x);
  const at::Tensor next_numbers = [&] {
    const GeneratorScope again(GeneratorState::now());
    return torch::rand({8});
  }();
  EXPECT_EQ(error_of<Refused>([&] { y.sum().backward({}, /*retain_graph=*/true); }), "in backward");
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(same_bits(torch::rand({8}), next_numbers));
  y.sum().backward();
  EXPECT_EQ(world.runs, 3);
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(Recompute, fails_if_the_second_run_saves_other_tensors) {
  constexpr const char* advice = "must be deterministic";
  const auto error_when_again = [&](const std::function<at::Tensor(const at::Tensor&)>& again) {
    world.runs = 0;
    const at::Tensor y =
        block([&](const at::Tensor& value) { return ++world.runs == 1 ? value.tanh().sin() : again(value); }, x);
    const std::string text = error_of<LogicError>([&] { y.sum().backward(); });
    EXPECT_EQ(SavedTensorScope::current(), nullptr);
    return text;
  };
  EXPECT_THAT(error_when_again([](const at::Tensor& value) { return value.sin(); }),
              AllOf(HasSubstr("it saved 1 tensors, and 2 at first"), HasSubstr(advice)));
  EXPECT_THAT(error_when_again([](const at::Tensor& value) { return value.tanh().sin().sin(); }),
              AllOf(HasSubstr("it saved 3 tensors, and 2 at first"), HasSubstr(advice)));
  EXPECT_THAT(error_when_again([](const at::Tensor& value) { return value.slice(0, 0, 2).tanh().sin(); }),
              AllOf(HasSubstr("is a CPUFloatType [2, 16], and was a CPUFloatType [4, 16]"), HasSubstr(advice)));
  EXPECT_THAT(error_when_again([](const at::Tensor& value) { return value.to(at::kDouble).tanh().sin(); }),
              AllOf(HasSubstr("is a CPUDoubleType [4, 16], and was a CPUFloatType [4, 16]"), HasSubstr(advice)));
}

}  // namespace terrace::testing
