// What LibTorch saves for backward, and what it says when that has changed.
#include <regex>
#include <stdexcept>

#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

/// What `act` throws, without the backtrace.
template <class Act>
std::string error_of(Act&& act) {
  try {
    act();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  throw std::logic_error("the program met no error");
}

/// The same without the name of the node that made the tensor. A linear layer saves its weight transposed, a view whose
/// node LibTorch makes anew when it writes its message (as_strided) and the hooks know as it was (t).
std::string error_without_maker(const std::string& error) {
  return std::regex_replace(error, std::regex("of [A-Za-z]+Backward0"), "of a node");
}

void changed_in_place(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 3; ++step) {
    const at::Tensor hidden = torch::tanh(model->layers[0](torch::randn({8, 64})));
    const at::Tensor loss = model->forward(hidden).pow(2).mean();
    if (step == 1) {
      const at::NoGradGuard no_grad;
      hidden.mul_(2);  // tanh has saved it
      world.record("error", error_of([&] { loss.backward(); }));
    } else {
      loss.backward();
    }
    optimizer->zero_grad(step == 1);
    optimizer->step();
  }
  const at::Tensor loss = model->loss();
  {
    const at::NoGradGuard no_grad;
    model->layers[3]->weight.mul_(2);  // and of a parameter
  }
  world.record("error", error_without_maker(error_of([&] { loss.backward(); })));
  optimizer->zero_grad();
  train(
      world, *model, *optimizer, [&](int) { return model->loss(); }, 2);
}

/// What a block has saved of its own output, through hooks where it will run again.
void changed_in_place_with_hooks(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  const at::Tensor out =
      block([layer = model->layers[0]](const at::Tensor& x) mutable { return torch::tanh(layer(x)); },
            torch::randn({8, 64}).requires_grad_());
  const at::Tensor loss = model->forward(out).pow(2).mean();
  {
    const at::NoGradGuard no_grad;
    out.mul_(2);
  }
  world.record("error", error_of([&] { loss.backward(); }));
  optimizer->zero_grad();
  train(
      world, *model, *optimizer, [&](int) { return model->loss(); }, 2);
}

void changed_in_place_in_block(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  const at::Tensor input = torch::randn({8, 64}).requires_grad_();
  const at::Tensor start = input * 1;
  const at::Tensor out =
      block([layer = model->layers[0]](const at::Tensor& x) mutable { return torch::tanh(layer(x)).pow(2); }, start);
  {
    const at::NoGradGuard no_grad;
    start.mul_(3);  // the block's input
  }
  world.record("error", error_of([&] { out.mean().backward(); }));
  optimizer->zero_grad();
  const at::Tensor second = block(
      [layer = model->layers[1]](const at::Tensor& x) mutable {
        const at::Tensor y = torch::tanh(layer(x));
        const at::Tensor z = y * y;
        const at::NoGradGuard no_grad;
        y.add_(1);  // what it saved itself
        return z;
      },
      input);
  world.record("error inside", error_of([&] { second.mean().backward(); }));
  optimizer->zero_grad();
  train(
      world, *model, *optimizer, [&](int) { return model->loss(); }, 2);
}

void kept_over_a_step(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  const at::Tensor kept = model->loss();
  model->loss().backward();
  optimizer->step();
  optimizer->zero_grad();
  world.record("error", error_without_maker(error_of([&] { kept.backward(); })));
  optimizer->zero_grad();
  train(
      world, *model, *optimizer, [&](int) { return model->loss(); }, 2);
}

}  // namespace

std::vector<Program> saved_tensor_programs() {
  return {
      {"an in-place change after saving", "of an activation and of a parameter", changed_in_place},
      {"an in-place change after saving, with hooks on", "of a block's output, which the block has saved",
       changed_in_place_with_hooks, nullptr, true},
      {"an in-place change after saving, inside blocks", "of a block's input, and within it", changed_in_place_in_block,
       nullptr, true},
      {"a graph kept over a step", "its parameters have been updated since", kept_over_a_step},
  };
}

}  // namespace terrace::testing
