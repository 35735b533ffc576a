// The engine that gives saved-tensor hooks leaves all else to the engine that was there before.

#include "integration/saved_tensors.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

using torch::autograd::Engine;

struct KeepTwice : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& value) override { tensor = value.detach() * 2; }
  at::Tensor call_unpack_hook() override { return tensor; }
  at::Tensor tensor;
};

/// As Python's: runs backward, and has hooks of its own.
struct OtherEngine : Engine {
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++executed;
    return next->execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return doubling ? std::make_unique<KeepTwice>() : next->get_default_saved_variable_hooks();
  }

  static OtherEngine& instance() {
    static auto* const engine = new OtherEngine;  // LibTorch keeps it
    return *engine;
  }

  Engine* next = &Engine::get_base_engine();
  int executed = 0;
  bool doubling = false;
};

Engine& other_engine() { return OtherEngine::instance(); }

/// Reentrant: its backward runs another one.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.sin();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::AutoGradMode grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    return {torch::autograd::grad({x.sin()}, {x}, {gradients[0]})[0]};
  }
};

}  // namespace

TEST(SavedTensors, backward_runs_on_the_engine_that_was_there_before) {
  torch::autograd::set_default_engine_stub(&other_engine);
  install_saved_tensor_hooks();
  install_saved_tensor_hooks();
  OtherEngine::instance().executed = 0;
  const at::Tensor x = torch::randn({4}).requires_grad_();
  x.exp().sum().backward();
  EXPECT_EQ(OtherEngine::instance().executed, 1);
  EXPECT_TRUE(same_bits(x.grad(), x.detach().exp()));
}

TEST(SavedTensors, hooks_of_the_engine_that_was_there_before_work_outside_of_blocks) {
  torch::autograd::set_default_engine_stub(&other_engine);
  install_saved_tensor_hooks();
  OtherEngine::instance().doubling = true;
  const at::Tensor x = torch::randn({4}).requires_grad_();
  x.exp().sum().backward();
  OtherEngine::instance().doubling = false;
  EXPECT_TRUE(same_bits(x.grad(), x.detach().exp() * 2));
}

TEST(SavedTensors, an_engine_that_forwards_to_ours_is_not_forwarded_to) {
  install_saved_tensor_hooks();
  OtherEngine front;
  static Engine* const in_front = &front;
  front.next = &Engine::get_default_engine();
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *in_front; });
  install_saved_tensor_hooks();
  EXPECT_EQ(&Engine::get_default_engine(), in_front);
  const at::Tensor x = torch::randn({4}).requires_grad_();
  x.exp().sum().backward();
  EXPECT_EQ(front.executed, 1);
  static Engine* const behind = front.next;
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *behind; });
}

TEST(SavedTensors, backward_within_backward_and_callbacks_work) {
  install_saved_tensor_hooks();
  const at::Tensor x = torch::randn({4}).requires_grad_();
  int called = 0;
  const at::Tensor y = Reentrant::apply(x);
  y.register_hook([&](const at::Tensor& gradient) {
    Engine::get_default_engine().queue_callback([&] { ++called; });
    return gradient;
  });
  y.sum().backward();
  EXPECT_EQ(called, 1);
  EXPECT_TRUE(same_bits(x.grad(), x.detach().cos()));
}

}  // namespace terrace::testing
