// A model that the program has let go of gives back what it had of the session, and nothing that can still be reached
// goes with it.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/session_world.h"

namespace terrace::testing {
namespace {

using World = SessionWorld;

std::vector<std::string> names_in(Session& session) {
  std::vector<std::string> names;
  session.for_each_parameter([&](const std::string& name, at::Tensor&) { names.push_back(name); });
  return names;
}

std::uint64_t resting_bytes(const Session& session) {
  const MemoryUsage usage = session.memory_usage();
  std::uint64_t bytes = 0;
  for (const Kind kind : {Kind::parameter, Kind::gradient, Kind::master, Kind::momentum, Kind::variance}) {
    bytes += usage.now(Tier::host, kind) + usage.now(Tier::nvme, kind) + usage.now(Tier::device, kind);
  }
  return bytes;
}

/// Transfers that are on their way end first.
void await_nothing_at_rest(const Session& session) {
  while (resting_bytes(session) > 0) {
    std::this_thread::yield();
  }
}

/// Trains a model, and leaves nothing of it behind.
void train_one(World& world, Tensors& results) {
  const auto model = world.build<Mlp>();
  const auto optimizer = world.adamw(*model);
  train(*model, *optimizer, 2, results);
  add_copies(*model, results);
}

}  // namespace

TEST(DeadModels, many_train_one_after_the_other_where_few_would_fit) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 24; ++i) {
      train_one(world, results);
    }
    return results;
  });
}

TEST(DeadModels, give_back_their_room_with_the_next_call_of_manage_or_construct) {
  const Config config = tight();
  World world(&config);
  Tensors results;
  train_one(world, results);
  EXPECT_GT(resting_bytes(*world.session), 0U);
  world.session->construct([] { return 0; });
  await_nothing_at_rest(*world.session);
  train_one(world, results);
  torch::nn::Linear other(3, 3);
  world.manage(*other);
  EXPECT_EQ(names_in(*world.session), (std::vector<std::string>{"weight", "bias"}));
}

TEST(DeadModels, give_back_their_names_and_their_part_of_a_checkpoint) {
  const TemporaryFolder folder;
  const Config config = tight();
  World world(&config);
  const auto alone = world.build<Normalized>();
  const std::vector<std::string> names = names_in(*world.session);
  std::shared_ptr<Normalized> second;
  {
    const auto first = world.build<Normalized>();
    EXPECT_GT(names_in(*world.session).size(), names.size());
  }
  world.session->save(folder.path() / "checkpoint");
  EXPECT_EQ(names_in(*world.session), names);
  EXPECT_NO_THROW(world.session->load(folder.path() / "checkpoint"));
}

TEST(DeadModels, leave_a_parameter_that_the_program_holds) {
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    World world(&config);
    at::Tensor held;
    at::Tensor view;
    at::Tensor expected;
    at::Tensor expected_of_view;
    {
      const auto model = world.build<Mlp>();
      Tensors losses;
      train(*model, *world.adamw(*model), 2, losses);
      held = model->parameters().front();
      view = model->parameters().back().detach();
      expected = held.detach().clone();
      expected_of_view = view.clone();
    }
    Tensors results;
    train_one(world, results);
    train_one(world, results);
    EXPECT_EQ(names_in(*world.session).size(), 2 + Mlp().parameters().size());
    expect_same_bits({held.detach().clone(), view.clone()}, {expected, expected_of_view});
    held.sum().backward();
    EXPECT_TRUE(held.grad().eq(1).all().item<bool>());
  }
}

TEST(DeadModels, live_on_in_a_graph) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    at::Tensor loss;
    at::Tensor input = torch::randn({8, width}, torch::requires_grad());
    {
      const auto model = world.build<Mlp>();
      loss = model->forward(input);
    }
    train_one(world, results);
    loss.backward();
    results.push_back(input.grad().clone());
    loss.reset();
    train_one(world, results);
    return results;
  });
}

TEST(DeadModels, leave_a_gradient_that_the_program_holds) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    at::Tensor kept;
    at::Tensor dropped;
    {
      const auto model = world.build<Mlp>();
      model->forward(batch()).backward();
      kept = model->parameters().front().grad();
      dropped = model->parameters().back().grad();
      model->parameters().back().mutable_grad().reset();
    }
    train_one(world, results);
    results.push_back(kept.clone());
    results.push_back(dropped.clone());
    return results;
  });
}

TEST(DeadModels, live_on_in_an_optimizer) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    auto model = world.build<Mlp>();
    const auto optimizer = world.adamw(*model);
    train(*model, *optimizer, 1, results);
    model->forward(batch()).backward();
    model.reset();
    {
      const auto other = world.make([] { return std::make_shared<Mlp>(2); });
      world.manage(*other);
    }
    optimizer->step();
    for (const at::Tensor& parameter : optimizer->param_groups().front().params()) {
      if (parameter.grad().defined()) {
        results.push_back(parameter.detach().clone());
      }
    }
    return results;
  });
}

TEST(DeadModels, of_which_half_lives_on_keep_the_bits_of_that_half) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    std::shared_ptr<Mlp> body;
    {
      struct Whole : torch::nn::Module {
        Whole() : body(register_module("body", std::make_shared<Mlp>(3))), head(torch::nn::Linear(width, width)) {
          register_module("head", head);
        }
        at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(x)).pow(2).mean() + body->forward(x); }
        std::shared_ptr<Mlp> body;
        torch::nn::Linear head;
      };
      const auto whole = world.build<Whole>();
      train(*whole, *world.adamw(*whole), 2, results);
      body = whole->body;
    }
    for (int i = 0; i < 3; ++i) {
      train_one(world, results);
    }
    const auto groups = AdamW::Groups{torch::optim::OptimizerParamGroup(body->parameters())};
    const auto options = AdamW::Options(1e-2);
    const auto optimizer = world.session ? std::make_unique<AdamW>(*world.session, groups, options)
                                         : std::make_unique<AdamW>(groups, options);
    train(*body, *optimizer, 2, results);
    add_copies(*body, results);
    return results;
  });
}

TEST(DeadModels, whose_optimizer_updates_within_backward_go_when_both_have_ended) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      const auto model = world.build<Mlp>();
      const auto optimizer = world.adamw(*model);
      if (world.session) {
        optimizer->update_in_backward(true);
      }
      train(*model, *optimizer, 2, results);
      add_copies(*model, results);
    }
    return results;
  });
}

// What the program holds of a storage that a parameter had before.
TEST(DeadModels, leave_a_storage_that_was_replaced_to_who_holds_it) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    at::Tensor before;
    at::Tensor from_graph;
    at::Tensor input = torch::randn({8, width}, torch::requires_grad());
    {
      const auto model = world.build<Mlp>();
      before = model->parameters().front().detach();
      model->parameters().front().set_data(torch::ones_like(before));
      const auto frozen = world.build<Mlp>();
      for (at::Tensor& parameter : frozen->parameters()) {
        parameter.set_requires_grad(false);
      }
      from_graph = frozen->forward(input);
      for (at::Tensor& parameter : frozen->parameters()) {
        parameter.set_data(torch::zeros_like(parameter));
      }
    }
    train_one(world, results);
    from_graph.backward();
    results.push_back(input.grad().clone());
    results.push_back(before.clone());
    train_one(world, results);
    return results;
  });
}

TEST(DeadModels, that_were_given_the_storage_of_another_are_in_nobodys_way) {
  const Config config = tight();
  World world(&config);
  const auto student = world.build<Mlp>();
  const std::size_t parameters = student->parameters().size();
  {
    const auto teacher = world.build<Mlp>();
    for (std::size_t i = 0; i < parameters; ++i) {
      teacher->parameters()[i].set_data(student->parameters()[i]);
    }
  }
  Tensors losses;
  EXPECT_NO_THROW(train(*student, *world.adamw(*student), 2, losses));
  EXPECT_EQ(names_in(*world.session).size(), parameters);
}

TEST(DeadModels, of_which_hooks_of_one_hold_another_go_together) {
  const Config config = tight();
  World world(&config);
  {
    const auto model = world.build<Normalized>();
    const std::vector<at::Tensor> parameters = model->parameters();
    for (std::size_t i = 1; i < parameters.size(); ++i) {
      parameters[i].register_hook([next = parameters[i - 1]](const at::Tensor& gradient) { return gradient; });
    }
    parameters.front().register_hook(
        [buffer = model->buffers().front()](const at::Tensor& gradient) { return gradient; });
  }
  const auto next = world.build<Normalized>();
  EXPECT_EQ(names_in(*world.session).size(), next->parameters().size());
  for (const std::string& name : names_in(*world.session)) {
    EXPECT_EQ(name.find('#'), std::string::npos) << name;
  }
}

namespace {

struct SharesABuffer : torch::nn::Module {
  SharesABuffer() {
    const at::Tensor both = torch::randn({2, width});
    register_buffer("sine", both[0]);
    register_buffer("cosine", both[1]);
  }
};

struct HasAParameter : torch::nn::Module {
  explicit HasAParameter(const at::Tensor& tensor) {
    register_parameter("of_another", tensor, /*requires_grad=*/false);
  }
};

}  // namespace

TEST(DeadModels, give_back_buffers_that_share_a_storage_or_became_parameters) {
  const TemporaryFolder folder;
  const Config config = tight();
  World world(&config);
  {
    const auto one = world.build<SharesABuffer>();
    const auto other = world.build<HasAParameter>(torch::randn({width}));
    struct Both : torch::nn::Module {
      explicit Both(const at::Tensor& tensor) { register_buffer("buffer", tensor); }
    };
    const auto shared = world.make([] { return torch::randn({width}); });
    const auto as_buffer = world.build<Both>(shared);
    const auto as_parameter = world.build<HasAParameter>(shared);
  }
  const auto next = world.build<SharesABuffer>();
  world.session->save(folder.path() / "one");
  EXPECT_EQ(names_in(*world.session).size(), 0U);
  EXPECT_LE(world.session->memory_usage().now(Tier::device, Kind::buffer), 4 * width * sizeof(float));
  EXPECT_NO_THROW(world.session->load(folder.path() / "one"));
}

TEST(DeadModels, of_an_optimizer_that_has_let_go_of_them_go_also_where_it_clips) {
  const Config config = tight();
  World world(&config);
  std::unique_ptr<AdamW> optimizer;
  Tensors losses;
  std::size_t parameters = 0;
  for (int i = 0; i < 24; ++i) {
    const auto model = world.build<Mlp>();
    parameters = model->parameters().size();
    if (optimizer == nullptr) {
      optimizer = std::make_unique<AdamW>(
          *world.session, AdamW::Groups{torch::optim::OptimizerParamGroup(model->parameters())}, AdamW::Options(1e-2));
      optimizer->max_gradient_norm(0.1);
    }
    optimizer->param_groups()[0].params() = model->parameters();
    train(*model, *optimizer, 2, losses);
  }
  EXPECT_EQ(names_in(*world.session).size(), parameters);
}

TEST(DeadModels, end_with_a_step_that_nobody_waits_for) {
  const TemporaryFolder folder;
  const Config config = tight_on_nvme(folder);
  World world(&config);
  for (int i = 0; i < 12; ++i) {
    const auto model = world.build<Mlp>();
    const auto optimizer = world.adamw(*model);
    model->forward(batch()).backward();
    optimizer->step();
  }
  world.session->construct([] { return 0; });
  EXPECT_TRUE(names_in(*world.session).empty());
}

}  // namespace terrace::testing
