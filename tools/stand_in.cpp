#include "tools/stand_in.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include <ATen/record_function.h>
#include <torch/library.h>

#include "base/clock.h"
#include "offload/emulated_computation.h"

namespace terrace {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kForwardShare = StandIn::forward_share;
constexpr float kGradient = 1e-3F;

float first_element(const at::Tensor& weight) {
  return weight.scalar_type() == at::kBFloat16 ? static_cast<float>(*weight.const_data_ptr<at::BFloat16>())
                                               : *weight.const_data_ptr<float>();
}

void compute(double seconds) { EmulatedComputation::of_this_process().queue(seconds); }

/// x + the first element of each weight; lasts `seconds` on the device.
at::Tensor forward_kernel(const at::Tensor& x, at::TensorList weights, double seconds) {
  float sum = x.const_data_ptr<float>()[0];
  for (const at::Tensor& weight : weights) sum += first_element(weight);
  compute(seconds);
  return at::full({1}, sum, x.options());
}

/// A gradient of that type for each of `sizes`, which share no memory; lasts `seconds` on the device.
std::vector<at::Tensor> backward_kernel(const at::Tensor& gradient, at::TensorList weights, at::IntArrayRef sizes,
                                        at::ScalarType type, double seconds) {
  volatile float read = 0;
  for (const at::Tensor& weight : weights) read = read + first_element(weight);
  std::vector<at::Tensor> results;
  for (const std::int64_t size : sizes) results.push_back(at::full({size}, kGradient, gradient.options().dtype(type)));
  compute(seconds);
  return results;
}

TORCH_LIBRARY(terrace_bench, library) {
  library.def("stand_in(Tensor x, Tensor[] weights, float seconds) -> Tensor");
  library.def(
      "stand_in_backward(Tensor gradient, Tensor[] weights, int[] sizes, ScalarType type, float seconds) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(terrace_bench, CPU, library) {
  library.impl("stand_in", forward_kernel);
  library.impl("stand_in_backward", backward_kernel);
}

at::Tensor call_forward(const at::Tensor& x, at::TensorList weights, double seconds) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("terrace_bench::stand_in", "")
                             .typed<at::Tensor(const at::Tensor&, at::TensorList, double)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x, weights, seconds);
}

std::vector<at::Tensor> call_backward(const at::Tensor& gradient, at::TensorList weights, at::IntArrayRef sizes,
                                      at::ScalarType type, double seconds) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("terrace_bench::stand_in_backward", "")
          .typed<std::vector<at::Tensor>(const at::Tensor&, at::TensorList, at::IntArrayRef, at::ScalarType, double)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(gradient, weights, sizes, type, seconds);
}

struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights, double seconds,
                            bool backward_reads) {
    context->save_for_backward(weights.vec());
    context->saved_data["seconds"] = seconds;
    context->saved_data["backward_reads"] = backward_reads;
    return call_forward(x, weights, seconds * kForwardShare);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list weights = context->get_saved_variables();
    std::vector<std::int64_t> sizes;
    for (const at::Tensor& weight : weights) sizes.push_back(weight.numel());
    const at::TensorList read =
        context->saved_data["backward_reads"].toBool() ? at::TensorList(weights) : at::TensorList();
    const auto made = call_backward(gradients[0], read, sizes, weights[0].scalar_type(),
                                    context->saved_data["seconds"].toDouble() * (1 - kForwardShare));
    variable_list results{gradients[0]};
    for (std::size_t i = 0; i < made.size(); ++i) results.push_back(made[i].view(weights[i].sizes()));
    results.resize(made.size() + 3);  // seconds and backward_reads have none
    return results;
  }
};

/// What the callback of `record_uses` fills, on this thread.
struct Recorder {
  std::unordered_map<const void*, std::size_t> index_of;  // of storages
  std::vector<RecordedUse> uses;

  void see(const at::RecordFunction& function) {
    std::vector<std::size_t> found;
    for (const c10::IValue& input : function.inputs()) {
      if (!input.isTensor() || !input.toTensor().defined() || !input.toTensor().has_storage()) continue;
      const auto known = index_of.find(input.toTensor().storage().unsafeGetStorageImpl());
      if (known != index_of.end()) found.push_back(known->second);
    }
    if (found.empty()) return;
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    // An op is made of ops and views, each of which shows some of the same parameters.
    if (!uses.empty() &&
        std::includes(uses.back().parameters.begin(), uses.back().parameters.end(), found.begin(), found.end())) {
      return;
    }
    uses.push_back(
        {.parameters = std::move(found), .backward_reads = std::string_view(function.name()) != "aten::embedding"});
  }
};

thread_local Recorder* recorder = nullptr;

std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& function) {
  if (recorder != nullptr) recorder->see(function);
  return nullptr;
}

}  // namespace

std::vector<RecordedUse> record_uses(const GptOptions& options) {
  Gpt model(options);
  Recorder seen;
  std::vector<double> elements;
  for (const at::Tensor& parameter : model->parameters()) {
    seen.index_of.emplace(parameter.storage().unsafeGetStorageImpl(), elements.size());
    elements.push_back(static_cast<double>(parameter.numel()));
  }
  const at::Tensor tokens = at::zeros({1, 2}, at::kLong);
  recorder = &seen;
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&record).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  model->forward(tokens, tokens);
  at::removeCallback(handle);
  recorder = nullptr;
  double all = 0;
  for (RecordedUse& use : seen.uses) {
    for (const std::size_t parameter : use.parameters) use.share += elements[parameter];
    all += use.share;
  }
  for (RecordedUse& use : seen.uses) use.share /= all;
  return std::move(seen.uses);
}

StandIn::StandIn(Gpt model, std::vector<RecordedUse> uses)
    : model_(std::move(model)), parameters_(model_->parameters()), uses_(std::move(uses)) {
  for (const at::Tensor& parameter : parameters_) elements_ += parameter.numel();
}

at::Tensor StandIn::forward() {
  at::Tensor x = at::zeros({1});
  for (const RecordedUse& use : uses_) {
    std::vector<at::Tensor> weights;
    for (const std::size_t parameter : use.parameters) weights.push_back(parameters_[parameter]);
    x = Function::apply(x, at::TensorList(weights), use.share * compute_seconds_, use.backward_reads);
  }
  return x;
}

double StandIn::bare_compute_seconds() {
  const Stopwatch watch;
  for (const RecordedUse& use : uses_) compute(use.share * compute_seconds_ * kForwardShare);
  for (auto use = uses_.rbegin(); use != uses_.rend(); ++use) {
    compute(use->share * compute_seconds_ * (1 - kForwardShare));
  }
  EmulatedComputation::of_this_process().wait();
  return watch.elapsed_seconds();
}

}  // namespace terrace
