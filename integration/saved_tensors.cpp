#include "integration/saved_tensors.h"

#include <atomic>
#include <utility>

#include <torch/csrc/autograd/engine.h>

#include "integration/current.h"

namespace terrace {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

/// What threads without a source of their own ask.
Current<SavedTensorSource>& usual_source() {
  static auto* const source = new Current<SavedTensorSource>;  // as the engine, which asks it
  return *source;
}

/// Its own threads and queues stay empty.
class HookingEngine final : public Engine {
 public:
  void forward_to(Engine& previous) noexcept { previous_.store(&previous, std::memory_order_release); }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (SavedTensorSource* const source = SavedTensorScope::current()) {
      return source->hooks();
    }
    auto hooks = previous().get_default_saved_variable_hooks();
    return hooks != nullptr ? std::move(hooks) : usual_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return previous().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, std::shared_ptr<torch::autograd::Node> root,
      torch::autograd::InputBuffer&& inputs) override {
    return previous().execute_with_graph_task(task, std::move(root), std::move(inputs));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous().make_anomaly_metadata();
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const std::shared_ptr<torch::autograd::Node>& node, std::exception& error) override {
    previous().thread_on_exception(task, node, error);
  }

 private:
  Engine& previous() const noexcept { return *previous_.load(std::memory_order_acquire); }

  std::atomic<Engine*> previous_{nullptr};
};

HookingEngine& hooking_engine() {
  // Lives until the process exits: LibTorch may ask for it while statics are destroyed.
  static HookingEngine* const engine = new HookingEngine;
  return *engine;
}

Engine& stub() { return hooking_engine(); }

/// Tells whether it was asked.
class Probe final : public SavedTensorSource {
 public:
  std::unique_ptr<SavedVariableHooks> hooks() override {
    asked = true;
    return nullptr;
  }
  bool asked = false;
};

/// Another engine may stand before ours and forward to it; to forward to that one would be a circle.
bool is_reached_by(Engine& engine) {
  Probe probe;
  const SavedTensorScope scope(probe);
  engine.get_default_saved_variable_hooks();
  return probe.asked;
}

}  // namespace

void set_usual_source(std::shared_ptr<SavedTensorSource> source) noexcept { usual_source().set(std::move(source)); }

std::unique_ptr<SavedVariableHooks> usual_hooks() {
  const std::shared_ptr<SavedTensorSource> source = usual_source().get();
  return source != nullptr ? source->hooks() : nullptr;
}

KeptTensor::KeptTensor(const at::Tensor& tensor) : hooks_(usual_hooks()) {
  if (hooks_ != nullptr) {
    hooks_->call_pack_hook(tensor);
  } else {
    tensor_ = tensor.detach();
  }
}

at::Tensor KeptTensor::get() const { return hooks_ != nullptr ? hooks_->call_unpack_hook() : tensor_; }

void install_saved_tensor_hooks() {
  Engine& current = Engine::get_default_engine();
  if (is_reached_by(current)) {
    return;
  }
  hooking_engine().forward_to(current);
  torch::autograd::set_default_engine_stub(&stub);
}

}  // namespace terrace
