// An optimizer over ordinary tensors: the same kernels, at once. What managed training must equal bit for bit.

#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "base/error.h"
#include "integration/element_types.h"
#include "integration/optimizer_backend.h"
#include "integration/optimizer_states.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/non_finite.h"
#include "optimizer/standard_arithmetic.h"
#include "optimizer/state_format.h"
#include "optimizer/update_threads.h"

namespace terrace {
namespace {

/// Throws ConfigError for values that `[optimizer]` of a configuration cannot have: a program may have filled it in.
const Config::Optimizer& valid(const Config::Optimizer& options) {
  Config whole;
  whole.optimizer = options;
  whole.validate();
  return options;
}

class Ordinary final : public OptimizerBackend {
 public:
  Ordinary(const OptimizerKind& kind, Optimizer::Groups& groups, const Config::Optimizer& config)
      : OptimizerBackend(kind),
        format_(state_format(valid(config).states)),
        non_finite_(non_finite(config.non_finite)),
        sums_in_float32_(config.accumulate == "float32") {
    ask_for_gradients(groups);
  }

  void step(Optimizer::Groups& groups) override {
    const StandardArithmetic standard;
    std::erase_if(states_, [](const auto& known) { return known.second.owner.expired(); });
    const std::vector<std::shared_ptr<const UpdateRule>> rules = require_updatable(groups);
    norm_.reset();
    float scale = static_cast<float>(1 / loss_scale);
    if (max_gradient_norm > 0 || non_finite_ != NonFinite::pass) {
      GradientNorms norms = norms_of(groups);
      norm_ = norms.all;
      norms.skipped = non_finite_ != NonFinite::pass && !std::isfinite(norms.all);
      report_->note(norms);
      if (norms.skipped) {
        ++steps_;
        refuse(groups);
        return;
      }
      if (max_gradient_norm > 0) {
        scale = static_cast<float>(clip_coefficient(*norm_, max_gradient_norm) / loss_scale);
      }
    }
    ++steps_;
    for (std::size_t group = 0; group < groups.size(); ++group) {
      for (const at::Tensor& parameter : groups[group].params()) {
        if (parameter.grad().defined()) {
          update(parameter, *rules[group], scale);
        }
      }
    }
    ask_for_gradients(groups);
  }

  void notice_groups(Optimizer::Groups& groups) override { ask_for_gradients(groups); }

  std::optional<double> gradient_norm() const override { return norm_; }

  void update_in_backward(bool on, Optimizer::Groups&) override {
    require_option(!on, kind_.name, "only what a session manages can be updated within backward");
  }
  bool updates_in_backward() const noexcept override { return false; }

 private:
  struct State {
    bool is_of(const at::Tensor& parameter) const {
      return type == parameter.scalar_type() && momentum.numel() == parameter.numel();
    }

    c10::weak_intrusive_ptr<c10::TensorImpl> owner;  // so that no other tensor comes to lie there
    at::ScalarType type;
    std::int64_t step = 0;
    at::Tensor master;  // where the parameter is bf16: fp32, or the lower halves as integers
    at::Tensor momentum;
    at::Tensor variance;
  };

  /// Before anything changes: of groups with options out of range, and of parameters that cannot be updated. The
  /// groups' rules.
  std::vector<std::shared_ptr<const UpdateRule>> require_updatable(const Optimizer::Groups& groups) const {
    std::vector<std::shared_ptr<const UpdateRule>> rules;
    for (const auto& group : groups) {
      rules.push_back(rule_of(group));
      for (const at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          require_updatable(parameter);
        }
      }
    }
    return rules;
  }

  void require_updatable(const at::Tensor& parameter) const {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.layout() != at::kStrided) {
      throw LogicError(std::string(kind_.name) + ": sparse gradients are not supported");
    }
    if (!parameter.is_non_overlapping_and_dense()) {
      throw LogicError(std::string(kind_.name) +
                       ": a parameter whose elements overlap or leave gaps cannot be updated");
    }
    if (parameter.is_neg()) {
      throw LogicError(std::string(kind_.name) + ": a parameter that is a negated view cannot be updated",
                       "resolve it (resolve_neg) before it is trained");
    }
    if (parameter.scalar_type() != at::kFloat && parameter.scalar_type() != at::kBFloat16) {
      throw LogicError(std::string(kind_.name) + std::string(" updates float32 and bfloat16 parameters, not ") +
                       c10::toString(parameter.scalar_type()));
    }
    if (gradient.sizes() != parameter.sizes()) {
      throw LogicError(c10::str(kind_.name, ": a parameter of shape ", parameter.sizes(), " has a gradient of shape ",
                                gradient.sizes()),
                       "give it one of its own shape");
    }
    if (!at::isFloatingType(gradient.scalar_type())) {
      throw LogicError(c10::str(kind_.name, ": a parameter of ", parameter.scalar_type(), " has a gradient of ",
                                gradient.scalar_type()),
                       "give it one of a floating-point type, which is converted");
    }
    const at::ScalarType type = gradient_type(parameter.scalar_type(), sums_in_float32_);
    if (type != parameter.scalar_type() && gradient.scalar_type() != type && parameter.is_leaf() &&
        parameter.grad_dtype() != type) {
      // It joined by a way of LibTorch's, so that nobody has asked: several micro-batches may be rounded already.
      throw LogicError(
          c10::str(kind_.name, ": a parameter of shape ", parameter.sizes(), " has a gradient summed up in ",
                   gradient.scalar_type(), ", and optimizer.accumulate asks for ", type),
          c10::str("let it join by ", kind_.name, "'s own add_param_group before its first backward, or ",
                   "call set_grad_dtype(at::kFloat) on it once it has no gradient"));
    }
    const auto known = states_.find(parameter.unsafeGetTensorImpl());
    if (known != states_.end() && !known->second.is_of(parameter)) {
      throw LogicError(c10::str(kind_.name, ": a parameter of shape ", parameter.sizes(),
                                " has another type or size since it was updated"),
                       "change it before the first step, or make another optimizer");
    }
  }

  /// The gradient with its elements in the order of the parameter's, of the type that gradients are summed up in, on
  /// the CPU.
  at::Tensor aligned_gradient(const at::Tensor& parameter) const {
    const at::Tensor& gradient = parameter.grad();
    const at::ScalarType type = gradient_type(parameter.scalar_type(), sums_in_float32_);
    if (gradient.strides() == parameter.strides() && gradient.scalar_type() == type && !gradient.is_neg()) {
      return gradient.to(at::kCPU);
    }
    return at::empty_like(parameter, at::TensorOptions().device(at::kCPU).dtype(type)).copy_(gradient);
  }

  /// LibTorch is to sum up gradients in the type that is wanted.
  void ask_for_gradients(Optimizer::Groups& groups) const {
    for (auto& group : groups) {
      for (at::Tensor& parameter : group.params()) {
        ask_for_gradients_of(gradient_type(parameter.scalar_type(), sums_in_float32_), parameter);
      }
    }
  }

  GradientNorms norms_of(const Optimizer::Groups& groups) const {
    GradientNorms norms;
    norms.step = steps_ + 1;
    std::vector<double> all;
    for (const auto& group : groups) {
      std::vector<double> sums;
      for (const at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          sums.push_back(sum_of_squares_of(parameter));
        }
      }
      norms.by_group.push_back(combined_norm(sums) / loss_scale);
      all.insert(all.end(), sums.begin(), sums.end());
    }
    norms.all = combined_norm(all) / loss_scale;
    return norms;
  }

  double sum_of_squares_of(const at::Tensor& parameter) const {
    const at::Tensor gradient = aligned_gradient(parameter);
    return sum_of_squares(element_type(gradient.scalar_type()), gradient.const_data_ptr(),
                          static_cast<std::size_t>(gradient.numel()), threads_);
  }

  /// Of gradients that are not finite.
  void refuse(const Optimizer::Groups& groups) const {
    if (non_finite_ != NonFinite::error) {
      return;
    }
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const auto& parameters = groups[group].params();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].grad().defined() && !std::isfinite(sum_of_squares_of(parameters[i]))) {
          throw non_finite_gradient(steps_, "parameter " + std::to_string(i) + " of group " + std::to_string(group));
        }
      }
    }
  }

  /// Of `trained`, whose bytes are in `parameter`. Zeros where it has none yet.
  State& state_of(const at::Tensor& trained, const at::Tensor& parameter) {
    if (const auto known = states_.find(trained.unsafeGetTensorImpl()); known != states_.end()) {
      return known->second;
    }
    const at::ScalarType moments = moment_type(format_) == ElementType::float32 ? at::kFloat : at::kBFloat16;
    State state{.owner = c10::weak_intrusive_ptr(trained.getIntrusivePtr()),
                .type = trained.scalar_type(),
                .master = {},
                .momentum = at::zeros_like(parameter, moments),
                .variance = {}};
    if (keeps_variance(kind_.name)) {
      state.variance = at::zeros_like(parameter, moments);
    }
    if (const std::size_t bytes = master_bytes(format_, element_type(parameter.scalar_type())); bytes != 0) {
      state.master = at::zeros_like(parameter, bytes == sizeof(float) ? at::kFloat : at::kShort);
    }
    return states_.emplace(trained.unsafeGetTensorImpl(), std::move(state)).first->second;
  }

  void update(const at::Tensor& trained, const UpdateRule& rule, float scale) {
    const at::Tensor gradient = aligned_gradient(trained);
    const at::Tensor parameter = trained.to(at::kCPU);  // where it is already, it is the same tensor
    State& state = state_of(trained, parameter);
    const auto data_of = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
    };
    const UpdateRun run{.parameter_type = element_type(parameter.scalar_type()),
                        .gradient_type = element_type(gradient.scalar_type()),
                        .states = format_,
                        .parameter = parameter.mutable_data_ptr(),
                        .gradient = gradient.const_data_ptr(),
                        .master = data_of(state.master),
                        .momentum = data_of(state.momentum),
                        .variance = data_of(state.variance),
                        .count = static_cast<std::size_t>(parameter.numel())};
    ++state.step;
    for_each_part(run, threads_, [&](const UpdateRun& part) { rule.update(state.step, scale, part); });
    if (!trained.is_cpu()) {
      trained.copy_(parameter);  // which bumps its version
      return;
    }
    trained.unsafeGetTensorImpl()->bump_version();
  }

  const StateFormat format_;
  const NonFinite non_finite_;
  const bool sums_in_float32_;
  const UpdateThreads threads_{at::get_num_threads()};
  std::unordered_map<const c10::TensorImpl*, State> states_;
  std::optional<double> norm_;
};

}  // namespace

std::unique_ptr<OptimizerBackend> make_ordinary_backend(const OptimizerKind& kind, Optimizer::Groups& groups,
                                                        const Config::Optimizer& config) {
  return std::make_unique<Ordinary>(kind, groups, config);
}

}  // namespace terrace
