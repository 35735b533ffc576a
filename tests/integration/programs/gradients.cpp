// Gradients in every ordinary use.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

/// Trains a Stack; `between` runs between backward and the step.
template <class Between>
void with_stack(World& world, Between&& between) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 4; ++step) {
    const at::Tensor loss = model->loss();
    loss.backward();
    world.record("loss", loss);
    between(*model, step);
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void clip_grad_norm(World& world) {
  with_stack(world, [&](Stack& model, int) {
    const double norm = torch::nn::utils::clip_grad_norm_(model.parameters(), 0.05);
    world.record("norm", std::to_string(norm));
  });
}

void zero_grad_by_optimizer(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);  // the second keeps tensors of zeros
    model->loss().backward();
    if (step % 2 == 1) {
      optimizer->zero_grad(/*set_to_none=*/false);
      world.record("zeros", model->layers[0]->weight.grad());
    }
    optimizer->step();  // moments decay where gradients are zeros
  }
  world.record(*model);
}

void zero_grad_by_module(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 4; ++step) {
    model->loss().backward();
    optimizer->step();
    model->zero_grad(/*set_to_none=*/step != 1);
    world.record("after zeroing", model->layers[0]->weight.grad());
  }
  world.record(*model);
}

void discarded(World& world) {
  with_stack(world, [](Stack& model, int step) {
    model.layers[step]->weight.mutable_grad() = at::Tensor();
    if (step == 2) {
      model.zero_grad();  // nothing is left to update with
    }
  });
}

void read(World& world) {
  with_stack(world, [&](Stack& model, int) {
    for (const auto& item : model.named_parameters()) {
      world.record(item.key() + ".grad", item.value().grad());
      world.record(item.key() + " norm", item.value().grad().norm());
    }
  });
}

void edited(World& world) {
  with_stack(world, [](Stack& model, int step) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.parameters()) {
      parameter.grad().mul_(0.5).add_(torch::randn(parameter.sizes()), 1e-3);
    }
    model.layers[step]->weight.grad().masked_fill_(model.layers[step]->weight.grad() < 0, 0);
  });
}

void set_by_hand(World& world) {
  with_stack(world, [](Stack& model, int step) {
    at::Tensor& weight = model.layers[step]->weight;
    weight.mutable_grad() = torch::randn_like(weight);
    // Of other strides, and one that belongs to another parameter too.
    model.layers[4]->weight.mutable_grad() = torch::randn({model.width, model.width}).t().clone();
    model.layers[5]->weight.mutable_grad() = weight.grad();
  });
}

void accumulation(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      (model->loss() / 3).backward();
    }
    world.record("sum", model->layers[1]->weight.grad());
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void retain_graph(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model->loss();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    world.record("three times", model->layers[1]->weight.grad());
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void create_graph(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model->loss();
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    at::Tensor penalty = torch::zeros({});
    for (const at::Tensor& parameter : model->parameters()) {
      penalty = penalty + parameter.grad().pow(2).sum();
    }
    penalty.backward();
    world.record("penalty", penalty);
    world.record("gradient of both", model->layers[0]->weight.grad());
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void several_backward_calls(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor out = model->forward(torch::randn({8, model->width}));
    const at::Tensor other = model->forward(torch::randn({4, model->width}));
    out.sum().backward({}, /*retain_graph=*/true);
    out.pow(2).mean().backward();
    other.abs().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void tensor_hooks(World& world) {
  const auto model = world.make<Stack>();
  model->layers[0]->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  world.manage(*model);
  int called = 0;
  model->layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
    ++called;
    return gradient.clamp(-1e-3, 1e-3);
  });
  train(world, *model, *world.adamw(), [&](int) {
    at::Tensor hidden = torch::tanh(model->layers[0](torch::randn({8, model->width})));
    hidden.register_hook([&](const at::Tensor& gradient) { world.record("of an activation", gradient); });
    return model->forward(hidden).pow(2).mean();
  });
  world.record("called", std::to_string(called));
}

struct CountAndHalve : torch::autograd::PostAccumulateGradHook {
  explicit CountAndHalve(int& the_count) : count(the_count) {}
  void operator()(const torch::autograd::Variable& variable) override {
    ++count;
    const at::NoGradGuard no_grad;
    variable.grad().mul_(0.5);
  }
  int& count;
};

void post_accumulate_hooks(World& world) {
  const auto model = world.make<Stack>();
  int before = 0;
  int after = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(model->layers[0]->weight, std::make_unique<CountAndHalve>(before));
  world.manage(*model);
  torch::autograd::impl::set_post_acc_grad_hooks(model->layers[1]->weight, std::make_unique<CountAndHalve>(after));
  train(world, *model, *world.adamw(), [&](int) { return model->loss(); });
  world.record("calls", std::to_string(before) + " " + std::to_string(after));
  for (int layer : {0, 1}) {
    torch::autograd::impl::set_post_acc_grad_hooks(model->layers[layer]->weight, nullptr);  // they use locals
  }
}

void autograd_grad(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  const std::vector<at::Tensor> parameters = model->parameters();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model->loss();
    const auto gradients = torch::autograd::grad({loss}, parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      world.record("untouched", parameters[i].grad());
      parameters[i].mutable_grad() = gradients[i] * 2;
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void sparse(World& world) {
  struct Sparse : torch::nn::Module {
    Sparse()
        : table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(512, 64).sparse(true)))),
          stack(register_module("stack", std::make_shared<Stack>())) {}
    torch::nn::Embedding table;
    std::shared_ptr<Stack> stack;
  };
  const auto model = world.make<Sparse>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  model->stack->forward(model->table(torch::randint(512, {8}, torch::kLong))).pow(2).mean().backward();
  optimizer->step();  // without a session nobody refuses earlier
}

}  // namespace

std::vector<Program> gradient_programs() {
  return {
      {"clip_grad_norm_", "LibTorch's own clipping, between backward and step", clip_grad_norm},
      {"zero_grad by optimizer", "to nothing and to zeros; a step on zeros", zero_grad_by_optimizer},
      {"zero_grad by module", "to nothing and to zeros", zero_grad_by_module},
      {"gradients discarded", "some, then all, before the step", discarded},
      {"gradients read", "each, by value and by ops", read},
      {"gradients edited", "in place, between backward and step", edited},
      {"gradients set by hand", "new tensors, of other strides, one for two parameters", set_by_hand},
      {"accumulation", "three micro-batches a step", accumulation},
      {"retain_graph", "three backward passes over one graph", retain_graph},
      {"create_graph", "gradients that have a graph, and its backward", create_graph},
      {"several backward calls", "two graphs alive, one of two losses", several_backward_calls},
      {"tensor hooks", "on parameters, before and after manage, and on an activation", tensor_hooks},
      {"user post-accumulate hooks", "set before and after manage", post_accumulate_hooks},
      {"autograd::grad", "gradients that go past the parameters", autograd_grad},
      {"sparse gradients", "an embedding with sparse(true)", sparse, "sparse gradient"},
  };
}

}  // namespace terrace::testing
