// p.grad stays what LibTorch users know, in every ordinary use, though its bytes are managed.

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_mlp.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

/// A model and its optimizer, with a session or without one.
struct World {
  explicit World(const Config* config = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (config != nullptr) {
      session.emplace(*config);
    }
    model = std::make_shared<Mlp>();
    if (session) {
      session->manage(*model);
    }
    const AdamW::Options options = AdamW::Options(1e-2).weight_decay(0.1);
    optimizer =
        session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(model->parameters(), options);
  }

  at::Tensor& weight(std::size_t layer) { return model->layers[layer]->weight; }
  at::Tensor& bias(std::size_t layer) { return model->layers[layer]->bias; }
  void backward() { model->forward(batch()).backward(); }
  void step() {
    optimizer->step();
    optimizer->zero_grad();
  }

  std::optional<Session> session;
  std::shared_ptr<Mlp> model;
  std::unique_ptr<AdamW> optimizer;
};

void add_parameters(World& world, Tensors& results) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    results.push_back(parameter.detach().clone());
  }
}

/// Undefined ones as an empty tensor, so that which are defined is compared too.
void add_gradients(World& world, Tensors& results) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    results.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : at::Tensor(torch::empty({0})));
  }
}

/// Runs a program without a session and in one of each configuration, and expects the same bits of all that it
/// returns and of the parameters; gradients must have moved.
void expect_the_bits_of_unmanaged(const std::function<Tensors(World&)>& program) {
  World plain;
  Tensors expected = program(plain);
  add_parameters(plain, expected);
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    SCOPED_TRACE(config.nvme.paths.empty() ? "all on the host" : "all on NVMe");
    Tensors actual;
    {
      World managed(&config);
      actual = program(managed);
      add_parameters(managed, actual);
      const MemoryUsage usage = managed.session->memory_usage();
      EXPECT_GT(usage.moved(Link::device_to_host, Kind::gradient), 0u);
      EXPECT_EQ(usage.moved(Link::host_to_nvme, Kind::gradient) > 0, !config.nvme.paths.empty());
      EXPECT_EQ(managed.session->last_error(), nullptr);
    }
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i << " of " << expected.size();
    }
  }
}

/// Reads every parameter, so that what was on the device before has to leave.
void read_all(World& world) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    parameter.detach().sum();
  }
}

std::uint64_t gradient_bytes_moved(World& world) {
  std::uint64_t bytes = 0;
  for (const Link link : all_links) {
    bytes += world.session->memory_usage().moved(link, Kind::gradient);
  }
  return bytes;
}

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

TEST(Gradients, are_defined_after_backward_and_undefined_after_zero_grad_by_optimizer_or_module) {
  const Config config = tight();
  World world(&config);
  const auto expect_defined = [&](bool defined) {
    for (const at::Tensor& parameter : world.model->parameters()) {
      EXPECT_EQ(parameter.grad().defined(), defined);
    }
  };
  expect_defined(false);
  world.backward();
  expect_defined(true);
  for (const at::Tensor& parameter : world.model->parameters()) {
    EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    EXPECT_EQ(parameter.grad().device(), world.session->device());
    EXPECT_FALSE(parameter.grad().requires_grad());
  }
  world.optimizer->zero_grad();
  expect_defined(false);
  world.backward();
  expect_defined(true);
  world.model->zero_grad();
  expect_defined(false);
  world.backward();
  world.optimizer->step();
  expect_defined(true);  // it keeps its value until it is zeroed
}

TEST(Gradients, zeroed_but_kept_are_zeros_and_accumulate) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      world.backward();
      world.optimizer->step();
      world.optimizer->zero_grad(/*set_to_none=*/false);
      add_gradients(world, results);
      world.backward();
      world.model->zero_grad(/*set_to_none=*/false);
      add_gradients(world, results);
      world.backward();
      world.backward();
      add_gradients(world, results);
    }
    return results;
  });
}

TEST(Gradients, accumulate_over_backward_calls) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      for (int micro = 0; micro < 3; ++micro) {
        world.backward();
        add_gradients(world, results);
      }
      world.step();
    }
    return results;
  });
}

TEST(Gradients, keep_their_value_after_the_step_until_they_are_zeroed) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    world.optimizer->max_gradient_norm(1e-3);  // clipping is the update's own: gradients keep their values
    world.backward();
    world.optimizer->step();
    read_all(world);
    add_gradients(world, results);
    world.optimizer->step();
    world.backward();
    add_gradients(world, results);
    world.step();
    return results;
  });
}

TEST(Gradients, can_be_clipped_by_the_program) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      const double norm = torch::nn::utils::clip_grad_norm_(world.model->parameters(), 1e-3);
      EXPECT_GT(norm, 1e-3);
      results.push_back(torch::tensor(norm, torch::kDouble));
      torch::nn::utils::clip_grad_value_(world.model->parameters(), 1e-5);
      add_gradients(world, results);
      world.step();
    }
    return results;
  });
}

TEST(Gradients, can_be_read_edited_set_and_discarded_by_hand_before_the_step) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      results.push_back(world.weight(0).grad().norm());
      results.push_back(torch::tensor(world.bias(0).grad()[3].item<float>()));
      world.weight(1).grad().mul_(2);
      world.weight(1).grad()[4].zero_();
      world.weight(2).mutable_grad() = torch::full({width, width}, 0.5);
      world.weight(3).mutable_grad() = world.weight(1).grad();  // one tensor, two parameters
      world.weight(4).mutable_grad() = world.weight(4).grad().t();
      world.bias(4).mutable_grad() = world.bias(3).grad().mean().expand({width});
      world.bias(5).mutable_grad() = world.bias(5).grad().clone();
      world.weight(5).mutable_grad().reset();
      read_all(world);
      add_gradients(world, results);
      world.optimizer->step();
      add_gradients(world, results);
      world.weight(4).mutable_grad().reset();  // LibTorch's zero_grad refuses views
      world.bias(4).mutable_grad().reset();
      world.optimizer->zero_grad();
    }
    return results;
  });
}

TEST(Gradients, set_by_hand_before_manage_are_adopted) {
  Tensors results[2];
  for (const bool managed : {false, true}) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    Mlp model;
    model.forward(batch()).backward();
    const Config config = tight();
    std::optional<Session> session;
    if (managed) {
      session.emplace(config);
      session->manage(model);
      EXPECT_ANY_THROW(model.layers[0]->weight.grad().data_ptr());
    }
    {
      const AdamW::Options options(1e-2);
      auto optimizer =
          session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(model.parameters(), options);
      optimizer->step();
    }
    for (const at::Tensor& parameter : model.parameters()) {
      results[managed].push_back(parameter.detach().clone());
      results[managed].push_back(parameter.grad().clone());
    }
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(same_bits(results[0][i], results[1][i])) << i;
  }
}

TEST(Gradients, held_by_the_program_keep_their_value_over_zero_grad_and_the_next_backward) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    Tensors held;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      held.push_back(world.weight(2).grad());
      held.push_back(world.bias(5).grad());
      held.push_back(world.weight(4).grad().t());  // a view holds it too
      world.step();
      read_all(world);
      for (const at::Tensor& gradient : held) {
        results.push_back(gradient.clone());
      }
    }
    world.weight(2).mutable_grad() = held[0];  // and can be given back
    world.optimizer->step();
    return results;
  });
}

TEST(Gradients, held_by_the_program_outlive_the_session) {
  at::Tensor held, expected;
  {
    const Config config = tight();
    World world(&config);
    world.backward();
    held = world.weight(1).grad();
    expected = held.clone();
    world.step();
    read_all(world);
  }
  EXPECT_NO_THROW(held.data_ptr());
  EXPECT_TRUE(same_bits(held, expected));
}

TEST(Gradients, that_were_discarded_cost_no_transfers) {
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    for (const bool by_module : {false, true}) {
      World world(&config);
      std::vector<std::uint64_t> moved_by_backward;
      for (int i = 0; i < 3; ++i) {
        const std::uint64_t start = gradient_bytes_moved(world);
        world.backward();
        const std::uint64_t end = gradient_bytes_moved(world);
        moved_by_backward.push_back(end - start);
        by_module ? world.model->zero_grad() : world.optimizer->zero_grad();
        read_all(world);
        EXPECT_EQ(gradient_bytes_moved(world), end);
      }
      EXPECT_EQ(moved_by_backward[1], moved_by_backward[0]) << "what was discarded has been brought back";
      EXPECT_EQ(moved_by_backward[2], moved_by_backward[0]);
    }
  }
}

TEST(Gradients, that_are_kept_do_cost_transfers_under_the_same_pressure) {
  const Config config = tight();
  World world(&config);
  world.backward();
  const std::uint64_t before = gradient_bytes_moved(world);
  read_all(world);
  EXPECT_GT(gradient_bytes_moved(world), before);
}

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

TEST(Gradients, parameters_without_one_are_skipped_by_the_step) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 4; ++i) {
      world.optimizer->max_gradient_norm(i % 2 == 0 ? 0 : 1e-3);
      at::Tensor x = batch();
      for (std::size_t layer = 0; layer < world.model->layers.size(); ++layer) {
        if (static_cast<int>(layer) % 3 != i % 3) {  // as experts that are not chosen
          x = torch::tanh(world.model->layers[layer](x));
        }
      }
      x.pow(2).mean().backward();
      const Tensors before = [&] {
        Tensors copies;
        add_parameters(world, copies);
        return copies;
      }();
      world.optimizer->step();
      const auto parameters = world.model->parameters();
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        EXPECT_EQ(same_bits(parameters[p].detach().clone(), before[p]), !parameters[p].grad().defined());
      }
      add_gradients(world, results);
      world.optimizer->zero_grad();
    }
    return results;
  });
}

}  // namespace terrace::testing
