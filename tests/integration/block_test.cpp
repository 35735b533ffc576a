// Recomputing a block changes memory and time, and nothing else: the bits are the same, whatever is in it.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "integration/saved_tensors.h"
#include "tests/integration/block_world.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using World = BlockWorld;

constexpr std::int64_t width = BlockWorld::width;

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

namespace {

struct Halves {
  at::Tensor left, right;
};

}  // namespace

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

TEST(Block, may_register_hooks_on_what_it_is_given) {
  expect_the_same_everywhere(3, [](World& world) {
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          value.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
          return torch::tanh(torch::autograd::grad({torch::tanh(value).sum()}, {value}, {}, true,
                                                   /*create_graph=*/true)[0]);
        },
        x * 1);
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad())};
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

TEST(Block, may_save_buffers_that_it_writes) {
  expect_the_same_everywhere(2, [](World& world) {
    Normalizing model;
    world.manage(model);
    const at::Tensor x = input();
    for (int i = 0; i < 2; ++i) {
      const at::Tensor y = block(
          [&](const at::Tensor& value, const at::Tensor& given) {
            ++world.runs;
            model.scale.mul_(1.5);
            return torch::tanh(value * model.scale) * given;
          },
          x, model.scale);
      y.sum().backward();
    }
    return Tensors{copy_of(x.grad()), copy_of(model.scale)};
  });
}

TEST(Block, changes_buffers_once_after_a_backward_of_its_own) {
  expect_the_same_everywhere(2, [](World& world) {
    Normalizing model;
    world.manage(model);
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          const at::Tensor slope = torch::autograd::grad({torch::tanh(value).sum()}, {value}, {}, true,
                                                         /*create_graph=*/true)[0];
          model.scale.mul_(1.5);
          return torch::tanh(slope * model.scale);
        },
        x);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(model.scale)};
  });
}

TEST(Block, may_differentiate_through_an_earlier_one_that_writes_what_it_reads) {
  expect_the_same_everywhere(3, [](World& world) {
    Normalizing model;
    world.manage(model);
    const at::Tensor x = input();
    const at::Tensor first = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          model.scale.add_(1);
          return torch::tanh(value);
        },
        x);
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          const at::Tensor slope = torch::autograd::grad({first.sum()}, {x}, {}, /*retain_graph=*/true)[0];
          return torch::tanh(value + model.scale) * slope;
        },
        x);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(model.scale)};
  });
}

TEST(Block, changes_buffers_once_that_an_op_takes_in_lists) {
  struct Moving : torch::nn::Module {
    at::Tensor mean = register_buffer("mean", torch::ones({width}));
    at::Tensor speed = register_buffer("speed", torch::ones({width}));
  };
  expect_the_same_everywhere(1, [](World& world) {
    Moving model;
    world.manage(model);
    const at::Tensor x = input();
    const at::Tensor y = block(
        [&](const at::Tensor& value) {
          ++world.runs;
          at::_fused_sgd_({model.mean}, {torch::ones({width})}, {model.speed}, /*weight_decay=*/0, /*momentum=*/0.9,
                          /*lr=*/0.1, /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false,
                          /*is_first_step=*/false);
          return torch::tanh(value * model.mean.clone()) * model.speed.clone();
        },
        x);
    y.sum().backward();
    return Tensors{copy_of(y), copy_of(x.grad()), copy_of(model.mean), copy_of(model.speed)};
  });
}

TEST(Block, changes_buffers_once_whose_storage_was_replaced_since_the_last_step) {
  expect_the_same_everywhere(2, [](World& world) {
    Normalizing model;
    world.manage(model);
    model.to(torch::kDouble);
    model.to(torch::kFloat);
    model.scale.set_data(torch::full({1}, 2.0f));
    const at::Tensor x = input();
    for (int i = 0; i < 2; ++i) {
      block(
          [&](const at::Tensor& value) {
            ++world.runs;
            return model.forward(value);
          },
          x)
          .sum()
          .backward();
    }
    Tensors results{copy_of(x.grad())};
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

}  // namespace terrace::testing
