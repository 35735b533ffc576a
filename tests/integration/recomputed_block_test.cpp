// What recomputing a block frees, and where it fails: with LibTorch's errors, and with the function's own.

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "integration/saved_tensors.h"
#include "tests/integration/block_world.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using World = BlockWorld;

constexpr std::int64_t width = BlockWorld::width;

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

TEST_F(Recompute, holds_nothing_after_a_backward_that_throws) {
  const at::Tensor wide = torch::randn({512, width}).requires_grad_();
  const at::Tensor y = block(
      [](const at::Tensor& value) {
        const at::Tensor middle = value.exp().sin();
        if (middle.requires_grad()) {
          middle.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("enough"); });
        }
        return middle.tanh();
      },
      wide);
  const at::Tensor loss = y.sum();
  const auto held = [&] { return world.session()->memory_usage().now(Tier::device, Kind::other); };
  const std::uint64_t before = held();
  EXPECT_EQ(error_of<std::runtime_error>([&] { loss.backward({}, /*retain_graph=*/true); }), "enough");
  EXPECT_EQ(held(), before);
}

TEST_F(Recompute, leaves_the_numbers_alone_that_others_draw_while_a_block_without_random_numbers_runs_again) {
  const auto numbers = [&](bool runs_again) {
    world.runs = 0;
    torch::manual_seed(7);
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          if (++world.runs == 2) {
            std::thread([] { torch::rand({8}); }).join();
          }
          return torch::tanh(value);
        },
        x);
    if (runs_again) {
      y.sum().backward();
    } else {
      torch::rand({8});
    }
    return torch::rand({8});
  };
  EXPECT_TRUE(same_bits(numbers(true), numbers(false)));
}

TEST_F(Recompute, fails_if_others_draw_numbers_while_a_block_with_random_numbers_runs) {
  for (const int interrupted_run : {1, 2}) {
    world.runs = 0;
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          const at::Tensor first = torch::dropout(torch::tanh(value), 0.5, true);
          if (++world.runs == interrupted_run) {
            std::thread([] { torch::rand({8}); }).join();
          }
          return torch::dropout(first, 0.5, true);
        },
        x);
    EXPECT_THAT(error_of<LogicError>([&] { y.sum().backward(); }),
                HasSubstr("another thread drew from LibTorch's default generator"));
  }
}

TEST_F(Recompute, makes_the_same_random_numbers_again_on_two_threads_at_once) {
  constexpr int rounds = 20;
  const auto gradients = [](bool in_blocks) {
    torch::manual_seed(7);
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> results;
    for (int i = 0; i < 2 * rounds; ++i) {
      inputs.push_back(input());
      const auto function = [](const at::Tensor& value) {
        return torch::dropout(torch::tanh(value), 0.5, true) * value;
      };
      results.push_back(in_blocks ? block(function, inputs.back()) : function(inputs.back()));
    }
    const auto backward = [&](int first) {
      for (int i = first; i < 2 * rounds; i += 2) {
        results[i].sum().backward();
      }
    };
    std::thread other(backward, 1);
    backward(0);
    other.join();
    std::vector<at::Tensor> all{torch::rand({8})};
    for (const at::Tensor& each : inputs) {
      all.push_back(each.grad());
    }
    return all;
  };
  expect_same_bits(gradients(true), gradients(false));
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
