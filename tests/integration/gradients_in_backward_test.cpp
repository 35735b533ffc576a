// Gradients as backward makes them: of graphs that are kept, seen and changed by hooks, undefined, sparse, of one that
// fails.

#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>

#include "tests/integration/gradient_world.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using World = GradientWorld;

/// Counts its calls, and adds up what it sees.
class CountingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  struct Seen {
    int calls = 0;
    at::Tensor sum = torch::zeros({});
  };
  explicit CountingHook(std::shared_ptr<Seen> seen) : seen_(std::move(seen)) {}
  void operator()(const torch::autograd::Variable& variable) override {
    ++seen_->calls;
    seen_->sum = seen_->sum + variable.grad().sum();
  }

 private:
  const std::shared_ptr<Seen> seen_;
};

/// Passes its input on; its weight gets no gradient: an undefined one arrives.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

}  // namespace

TEST(Gradients, with_a_graph_of_their_own_can_be_differentiated) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      if (i == 1) {
        world.backward();  // one without a graph is there already
      }
      const at::Tensor loss = world.model->forward(batch());
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      at::Tensor penalty = torch::zeros({});
      for (const at::Tensor& parameter : world.model->parameters()) {
        EXPECT_TRUE(parameter.grad().defined());
        penalty = penalty + parameter.grad().pow(2).sum();
      }
      EXPECT_TRUE(penalty.requires_grad());
      add_gradients(world, results);
      penalty.backward();
      add_gradients(world, results);
      world.step();
      world.backward();
      world.step();
    }
    return results;
  });
}

TEST(Gradients, of_a_retained_graph_accumulate) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      const at::Tensor loss = world.model->forward(batch());
      loss.backward({}, /*retain_graph=*/true);
      read_all(world);
      loss.backward();
      add_gradients(world, results);
      world.step();
    }
    return results;
  });
}

TEST(Gradients, a_graph_kept_over_a_step_fails_as_in_libtorch) {
  const Config config = tight();
  for (const Config* with : {static_cast<const Config*>(nullptr), &config}) {
    World world(with);
    const at::Tensor loss = world.model->forward(batch());
    loss.backward({}, /*retain_graph=*/true);
    world.optimizer->step();
    try {
      loss.backward();
      ADD_FAILURE() << "it did not fail";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    }
  }
}

TEST(Gradients, autograd_grad_leaves_them_alone) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (const bool defined : {false, true}) {
      if (defined) {
        world.backward();
      }
      const auto gradients = torch::autograd::grad({world.model->forward(batch())}, world.model->parameters());
      results.insert(results.end(), gradients.begin(), gradients.end());
      for (const at::Tensor& parameter : world.model->parameters()) {
        EXPECT_EQ(parameter.grad().defined(), defined);
      }
      add_gradients(world, results);
    }
    world.step();
    return results;
  });
}

TEST(Gradients, post_accumulate_hooks_set_before_manage_run_once_a_backward_and_see_the_sum) {
  Tensors sums[2];
  for (const bool managed : {false, true}) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    const Config config = tight();
    std::optional<Session> session;
    if (managed) {
      session.emplace(config);
    }
    Mlp model;
    std::vector<std::shared_ptr<CountingHook::Seen>> seen;
    for (const at::Tensor& parameter : model.parameters()) {
      seen.push_back(std::make_shared<CountingHook::Seen>());
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<CountingHook>(seen.back()));
    }
    if (session) {
      session->manage(model);
    }
    for (int i = 1; i <= 3; ++i) {
      model.forward(batch()).backward();
      for (const auto& one : seen) {
        EXPECT_EQ(one->calls, i);
      }
    }
    session.reset();
    model.forward(batch()).backward();
    for (const auto& one : seen) {
      EXPECT_EQ(one->calls, 4);
      sums[managed].push_back(one->sum);
    }
  }
  for (std::size_t i = 0; i < sums[0].size(); ++i) {
    EXPECT_TRUE(same_bits(sums[0][i], sums[1][i])) << i;
  }
}

TEST(Gradients, post_accumulate_hooks_set_after_manage_run_too) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    const auto seen = std::make_shared<CountingHook::Seen>();
    world.backward();
    torch::autograd::impl::set_post_acc_grad_hooks(world.weight(1), std::make_unique<CountingHook>(seen));
    for (int i = 1; i <= 2; ++i) {
      world.backward();
      add_gradients(world, results);
      EXPECT_EQ(seen->calls, i);
    }
    world.step();
    world.backward();
    world.step();
    EXPECT_EQ(seen->calls, 3);
    results.push_back(seen->sum);
    return results;
  });
}

TEST(Gradients, tensor_hooks_change_them_on_their_way) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    int calls = 0;
    for (std::size_t layer = 0; layer < world.model->layers.size(); ++layer) {
      world.weight(layer).register_hook([&calls](const at::Tensor& gradient) {
        ++calls;
        return gradient * 3;
      });
    }
    world.backward();
    world.backward();
    add_gradients(world, results);
    world.step();
    EXPECT_EQ(calls, 12);
    for (std::size_t layer = 0; layer < world.model->layers.size(); ++layer) {
      torch::autograd::impl::clear_hooks(world.weight(layer));  // they refer to `calls`
    }
    return results;
  });
}

TEST(Gradients, an_undefined_one_that_arrives_leaves_what_is_accumulated) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      world.backward();
      at::Tensor x = batch();
      for (auto& layer : world.model->layers) {
        x = WithoutGradient::apply(torch::tanh(layer(x)), world.weight(0));
      }
      x.pow(2).mean().backward();
      add_gradients(world, results);
      world.bias(0).requires_grad_(false);
      WithoutGradient::apply(world.bias(1) * 2, world.weight(1)).sum().backward();
      world.bias(0).requires_grad_(true);
      add_gradients(world, results);
      world.step();
    }
    return results;
  });
}

TEST(Gradients, of_parameters_that_were_frozen_after_the_forward_stay_as_they_are) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    world.backward();
    const at::Tensor loss = world.model->forward(batch());
    world.weight(2).requires_grad_(false);
    loss.backward();
    world.weight(2).requires_grad_(true);
    add_gradients(world, results);
    world.step();
    return results;
  });
}

TEST(Gradients, of_a_backward_that_failed_do_not_come_back_after_zero_grad) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    auto fails = std::make_shared<bool>(false);
    struct Failing : torch::autograd::FunctionPreHook {
      explicit Failing(std::shared_ptr<bool> when) : fails(std::move(when)) {}
      torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
        if (*fails) {
          throw std::runtime_error("the program's own");
        }
        return gradients;
      }
      std::shared_ptr<bool> fails;
    };
    // The last thing before a gradient is accumulated.
    const auto accumulator = torch::autograd::impl::grad_accumulator(world.weight(3));
    accumulator->add_pre_hook(std::make_unique<Failing>(fails));
    world.backward();
    *fails = true;
    EXPECT_THROW(world.backward(), std::runtime_error);
    *fails = false;
    world.optimizer->zero_grad();
    world.backward();
    add_gradients(world, results);
    world.step();
    return results;
  });
}

namespace {

struct SparseEmbedding : torch::nn::Module {
  SparseEmbedding()
      : dense(register_module("dense", std::make_shared<Mlp>())),
        table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(30, width).sparse(true)))) {}
  at::Tensor forward() { return dense->forward(table(torch::tensor({1, 2, 2, 3}))); }
  std::shared_ptr<Mlp> dense;
  torch::nn::Embedding table;
};

}  // namespace

TEST(Gradients, that_are_sparse_are_refused_by_name_in_the_first_backward) {
  const Config config = tight();
  at::set_num_threads(1);
  Session session(config);
  SparseEmbedding model;
  session.manage(model);
  for (int i = 0; i < 2; ++i) {
    try {
      model.forward().backward();
      FAIL() << "a sparse gradient was accepted";
    } catch (const LogicError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'table.weight'"));
      EXPECT_THAT(error.what(), HasSubstr("sparse"));
    }
    EXPECT_FALSE(model.table->weight.grad().defined());
  }
}

}  // namespace terrace::testing
