#include "integration/adamw.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "integration/adamw_backend.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

std::vector<at::Tensor> all_parameters(Session& session) {
  std::vector<at::Tensor> tensors;
  const auto held = session.state()->lock();
  session.state()->take_in_replaced();  // some may have been unfrozen
  for (const ManagedParameter& parameter : session.state()->parameters()) {
    if (parameter.gradient_chunk) {
      tensors.push_back(parameter.tensor);
    }
  }
  return tensors;
}

[[noreturn]] void refuse_archive() {
  throw LogicError("AdamW's archive does not hold the moments that a session manages", "use Session::save");
}

}  // namespace

AdamWOptions checked_options(const torch::optim::OptimizerParamGroup& group, bool maximize) {
  const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
  const auto [beta1, beta2] = options.betas();
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) {
      throw LogicError("AdamW: " + what);
    }
  };
  require(!options.amsgrad(), "amsgrad is not supported");
  require(options.lr() >= 0, "the learning rate is " + std::to_string(options.lr()) + ", not 0 or more");
  require(options.eps() >= 0, "eps is " + std::to_string(options.eps()) + ", not 0 or more");
  require(beta1 >= 0 && beta1 < 1, "the first beta is " + std::to_string(beta1) + ", not in [0, 1)");
  require(beta2 >= 0 && beta2 < 1, "the second beta is " + std::to_string(beta2) + ", not in [0, 1)");
  require(options.weight_decay() >= 0,
          "the weight decay is " + std::to_string(options.weight_decay()) + ", not 0 or more");
  return {.learning_rate = options.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .epsilon = options.eps(),
          .weight_decay = options.weight_decay(),
          .maximize = maximize};
}

AdamW::AdamW(Session& session, Options defaults)
    : Optimizer(all_parameters(session), std::make_unique<Options>(std::move(defaults))),
      backend_(make_managed_backend(session, param_groups_, /*joins_all=*/true)) {
  for (const auto& group : param_groups_) {
    checked_options(group);
  }
}

AdamW::AdamW(Session& session, const Groups& groups, Options defaults)
    : Optimizer(groups, std::make_unique<Options>(std::move(defaults))),
      backend_(make_managed_backend(session, param_groups_, /*joins_all=*/false)) {
  for (const auto& group : param_groups_) {
    checked_options(group);
  }
}

AdamW::AdamW(std::vector<at::Tensor> parameters, Options defaults, StateFormat states)
    : Optimizer(std::move(parameters), std::make_unique<Options>(std::move(defaults))),
      backend_(make_ordinary_backend(states)) {
  for (const auto& group : param_groups_) {
    checked_options(group);
  }
}

AdamW::AdamW(const Groups& groups, Options defaults, StateFormat states)
    : Optimizer(groups, std::make_unique<Options>(std::move(defaults))), backend_(make_ordinary_backend(states)) {
  for (const auto& group : param_groups_) {
    checked_options(group);
  }
}

AdamW::~AdamW() = default;

void AdamW::max_gradient_norm(double norm) {
  if (!(norm >= 0)) {
    throw LogicError("AdamW: max_gradient_norm is " + std::to_string(norm) + ", not 0 (off) or more");
  }
  backend_->max_gradient_norm = norm;
}

void AdamW::maximize(bool on) noexcept { backend_->maximize = on; }

std::optional<double> AdamW::gradient_norm() const { return backend_->gradient_norm(); }

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_graph(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  backend_->step(param_groups_);
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive&) const { refuse_archive(); }

void AdamW::load(torch::serialize::InputArchive&) { refuse_archive(); }

}  // namespace terrace
