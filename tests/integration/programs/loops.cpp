// Ways to train: several models, updates in unusual places, models that outlive their session.
#include <sstream>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

namespace nn = torch::nn;

AdamW::Groups group_of(const nn::Module& module) { return {torch::optim::OptimizerParamGroup(module.parameters())}; }

/// A generator and a discriminator, which gets gradients in the generator's turn too: they are discarded.
void several_models(World& world) {
  const auto generator = world.make<Stack>(64, 4);
  const auto discriminator = world.make<Stack>(64, 4);
  world.manage(*generator);
  world.manage(*discriminator);
  const auto of_generator = world.adamw(group_of(*generator));
  const auto of_discriminator = world.adamw(group_of(*discriminator), AdamW::Options(3e-3));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor made = generator->forward(torch::randn({8, 64}));
    const at::Tensor loss =
        discriminator->forward(made.detach()).mean() - discriminator->forward(torch::randn({8, 64})).mean();
    loss.backward();
    of_discriminator->step();
    of_discriminator->zero_grad();
    const at::Tensor deceived = -discriminator->forward(generator->forward(torch::randn({8, 64}))).mean();
    deceived.backward();
    of_generator->step();
    of_generator->zero_grad();
    of_discriminator->zero_grad();
    world.record("losses", torch::stack({loss, deceived}));
  }
  world.record(*generator);
  world.record(*discriminator);
}

void modules_added_later(World& world) {
  struct Growing : Stack {
    Growing() : Stack(64, 4) {}
    void grow(const std::shared_ptr<Stack>& part) { parts.push_back(register_module(numbered("part", ++count), part)); }
    std::vector<std::shared_ptr<Stack>> parts;
    int count = 0;
  };
  const auto model = world.make<Growing>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int stage = 0; stage < 3; ++stage) {
    if (stage > 0) {
      model->grow(world.make<Stack>(64, 2));
      world.manage(*model);
      if (world.session() == nullptr) {  // with one they join by themselves
        optimizer->add_parameters(model->parts.back()->parameters());
      }
    }
    for (int step = 0; step < 2; ++step) {
      at::Tensor x = model->forward(torch::randn({8, 64}));
      for (const auto& part : model->parts) {
        x = part->forward(x);
      }
      const at::Tensor loss = x.pow(2).mean();
      loss.backward();
      world.record("loss", loss);
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  world.record(*model);
}

/// Parameters, gradients and buffers are ordinary tensors then, also where an update was queued still.
void after_its_session(World& world) {
  struct Normed : nn::Module {
    Normed()
        : stack(register_module("stack", std::make_shared<Stack>())),
          norm(register_module("norm", nn::BatchNorm1d(64))) {}
    at::Tensor loss() { return stack->forward(norm(torch::randn({8, 64}))).pow(2).mean(); }
    std::shared_ptr<Stack> stack;
    nn::BatchNorm1d norm;
  };
  const auto model = world.make<Normed>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    model->loss().backward();
    optimizer->step();
  }
  world.end_session();
  world.record(*model);
  for (const at::Tensor& parameter : model->parameters()) {
    world.record("gradient", parameter.grad());
    world.record("by pointer", std::to_string(parameter.const_data_ptr<float>()[3]));
  }
  AdamW further(model->parameters(), AdamW::Options(1e-2));
  for (int step = 0; step < 2; ++step) {
    further.zero_grad();
    model->loss().backward();
    further.step();
  }
  world.record(*model);
}

/// Updates a parameter as soon as its gradient is whole, which then need not be kept.
struct StepsAndForgets : torch::autograd::PostAccumulateGradHook {
  explicit StepsAndForgets(AdamW& the_optimizer) : optimizer(the_optimizer) {}
  void operator()(const torch::autograd::Variable&) override {
    optimizer.step();
    optimizer.zero_grad();
  }
  AdamW& optimizer;
};

void optimizer_in_backward(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  std::vector<std::unique_ptr<AdamW>> optimizers;
  for (const at::Tensor& parameter : model->parameters()) {
    optimizers.push_back(world.adamw(AdamW::Groups{torch::optim::OptimizerParamGroup({parameter})}));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<StepsAndForgets>(*optimizers.back()));
  }
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model->loss();
    loss.backward();
    world.record("loss", loss);
    for (const at::Tensor& parameter : model->parameters()) {
      world.record("forgotten", parameter.grad());
    }
  }
  for (const at::Tensor& parameter : model->parameters()) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);  // they use locals
  }
  world.record(*model);
}

void moving_averages(World& world) {
  const auto model = world.make<Stack>();
  const auto average = world.make<Stack>();
  for (at::Tensor& parameter : average->parameters()) {
    parameter.set_requires_grad(false);
  }
  world.manage(*model);
  world.manage(*average);
  const auto optimizer = world.adamw(group_of(*model));
  for (int step = 0; step < 4; ++step) {
    model->loss().backward();
    optimizer->step();
    optimizer->zero_grad();
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> parameters = model->parameters();
    const std::vector<at::Tensor> averages = average->parameters();
    for (std::size_t i = 0; i < averages.size(); ++i) {
      step == 0 ? averages[i].copy_(parameters[i]) : averages[i].lerp_(parameters[i], 0.1);
    }
    world.record("evaluated", average->forward(torch::randn({8, 64})));
  }
  world.record(*model);
  world.record(*average);
}

void one_flat_vector(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  train(world, *model, *optimizer, [&](int step) {
    if (step == 2) {
      const at::NoGradGuard no_grad;
      const at::Tensor flat = nn::utils::parameters_to_vector(model->parameters()) * 0.9;
      std::int64_t begin = 0;
      for (at::Tensor& parameter : model->parameters()) {
        parameter.copy_(flat.narrow(0, begin, parameter.numel()).view_as(parameter));
        begin += parameter.numel();
      }
    }
    return model->loss() + 1e-3 * nn::utils::parameters_to_vector(model->parameters()).pow(2).sum();
  });
}

void computed_weights(World& world) {
  struct Normalized : nn::Module {
    Normalized() {
      for (int i = 0; i < 6; ++i) {
        directions.push_back(register_parameter(numbered("direction", i), torch::randn({64, 64})));
        lengths.push_back(register_parameter(numbered("length", i), torch::ones({64, 1})));
      }
    }
    at::Tensor loss() {
      at::Tensor x = torch::randn({8, 64});
      for (std::size_t i = 0; i < directions.size(); ++i) {
        const at::Tensor weight = directions[i] * (lengths[i] / directions[i].norm(2, {1}, /*keepdim=*/true));
        x = torch::tanh(torch::linear(x, weight));
      }
      return x.pow(2).mean();
    }
    std::vector<at::Tensor> directions, lengths;
  };
  const auto model = world.make<Normalized>();
  train(world, *model, [&](int) { return model->loss(); });
}

void gradient_penalty(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    const at::Tensor x = torch::randn({8, 64}).requires_grad_();
    const at::Tensor out = model->forward(x);
    const at::Tensor slope =
        torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return out.pow(2).mean() + (slope.norm(2, {1}) - 1).pow(2).mean();
  });
}

void unrolled(World& world) {
  struct Recurrent : nn::Module {
    Recurrent()
        : stack(register_module("stack", std::make_shared<Stack>())),
          cell(register_module("cell", nn::GRUCell(64, 64))) {}
    at::Tensor loss() {
      at::Tensor state = torch::zeros({8, 64});
      at::Tensor sum = torch::zeros({});
      for (int time = 0; time < 5; ++time) {
        state = cell(stack->forward(torch::randn({8, 64})), state);
        sum = sum + state.pow(2).mean();
      }
      return sum;
    }
    std::shared_ptr<Stack> stack;
    nn::GRUCell cell;
  };
  const auto model = world.make<Recurrent>();
  train(
      world, *model, [&](int) { return model->loss(); }, 3);
}

void inference_mode(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    model->loss().backward();
    optimizer->step();
    optimizer->zero_grad();
    const c10::InferenceMode inference;
    world.record("evaluated", model->forward(torch::randn({8, 64})));
  }
  world.record(*model);
}

void saved_by_torch(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  train(
      world, *model, *optimizer, [&](int) { return model->loss(); }, 2);
  for (nn::Linear& layer : model->layers) {
    std::stringstream archive;
    {
      std::optional<Gathered> view;
      if (Session* session = world.session()) {
        view.emplace(session->gather(*layer, Access::read));
      }
      torch::save(layer, archive);
    }
    nn::Linear copy(64, 64);
    torch::load(copy, archive);
    world.record(*copy);
  }
}

}  // namespace

std::vector<Program> loop_programs() {
  return {
      {"several models", "each with its optimizer; one's gradients are discarded", several_models},
      {"modules added later", "to a model that is trained already", modules_added_later},
      {"what a model holds after its session", "parameters, gradients, buffers; trained further", after_its_session},
      {"optimizer in backward", "a step for each parameter, from its hook", optimizer_in_backward},
      {"moving averages", "lerp_ into a managed copy, which is evaluated", moving_averages},
      {.name = "parameters_to_vector",
       .unusual = "as a penalty, and written back",
       .run = one_flat_vector,
       .wants_all = true},
      {"computed weights", "directions and lengths", computed_weights},
      {"gradient penalty", "autograd::grad of the input, with a graph", gradient_penalty},
      {"a module in a loop", "a GRUCell and a stack, five times a step", unrolled},
      {"inference mode", "between two steps", inference_mode},
      {"torch::save", "of gathered layers", saved_by_torch},
  };
}

}  // namespace terrace::testing
