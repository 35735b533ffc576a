#include "integration/optimizer.h"

#include <cmath>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "integration/optimizer_backend.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

std::vector<at::Tensor> all_parameters(Session& session) {
  std::vector<at::Tensor> tensors;
  const auto held = session.state()->lock();
  session.state()->take_in_replaced();  // some may have been unfrozen
  for (const ManagedParameter& parameter : session.state()->parameters()) {
    tensors.push_back(parameter.tensor);
  }
  return tensors;
}

/// Has each parameter count once in its group: one that is tied is among a module's parameters as often as it is used.
/// Throws LogicError, and changes nothing, where two groups have one.
void drop_repeated(Optimizer::Groups& groups, std::string_view kind) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> group_of;
  std::size_t count = 0;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& parameter : groups[group].params()) {
      ++count;
      const std::size_t first = group_of.emplace(parameter.unsafeGetTensorImpl(), group).first->second;
      if (first != group) {
        throw LogicError(c10::str(kind, ": a parameter of shape ", parameter.sizes(), " is in group ", first,
                                  " and in group ", group));
      }
    }
  }
  if (group_of.size() == count) {
    return;
  }
  std::unordered_set<const c10::TensorImpl*> known;
  for (auto& group : groups) {
    std::erase_if(group.params(),
                  [&](const at::Tensor& parameter) { return !known.insert(parameter.unsafeGetTensorImpl()).second; });
  }
}

[[noreturn]] void refuse_archive(std::string_view kind) {
  throw LogicError(std::string(kind) + "'s archive does not hold the states that a session manages",
                   "use Session::save");
}

}  // namespace

Optimizer::Optimizer(const OptimizerKind& kind, Session& session, Defaults defaults)
    : torch::optim::Optimizer(all_parameters(session), std::move(defaults)),
      kind_(kind),
      backend_(make_managed_backend(kind, session, param_groups_, /*joins_all=*/true)) {
  check_groups();
}

Optimizer::Optimizer(const OptimizerKind& kind, Session& session, const Groups& groups, Defaults defaults)
    : torch::optim::Optimizer(groups, std::move(defaults)),
      kind_(kind),
      backend_(make_managed_backend(kind, session, param_groups_, /*joins_all=*/false)) {
  check_groups();
}

Optimizer::Optimizer(const OptimizerKind& kind, std::vector<at::Tensor> parameters, Defaults defaults,
                     const Config::Optimizer& config)
    : torch::optim::Optimizer(std::move(parameters), std::move(defaults)),
      kind_(kind),
      backend_(make_ordinary_backend(kind, param_groups_, config)) {
  check_groups();
}

Optimizer::Optimizer(const OptimizerKind& kind, const Groups& groups, Defaults defaults,
                     const Config::Optimizer& config)
    : torch::optim::Optimizer(groups, std::move(defaults)),
      kind_(kind),
      backend_(make_ordinary_backend(kind, param_groups_, config)) {
  check_groups();
}

Optimizer::~Optimizer() = default;

void Optimizer::check_groups() {
  drop_repeated(param_groups_, kind_.name);
  for (const auto& group : param_groups_) {
    kind_.rule(group.options(), /*maximize=*/false);
  }
}

void Optimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  torch::optim::Optimizer::add_param_group(group);
  backend_->notice_groups(param_groups_);
}

void Optimizer::max_gradient_norm(double norm) {
  require_option(norm >= 0, kind_.name, "max_gradient_norm is " + std::to_string(norm) + ", not 0 (off) or more");
  require_option(norm == 0 || !backend_->updates_in_backward(), kind_.name,
                 "gradients cannot be clipped where they are used up within backward (update_in_backward)");
  backend_->max_gradient_norm = norm;
}

void Optimizer::loss_scale(double factor) {
  require_option(factor > 0 && std::isnormal(static_cast<float>(1 / factor)), kind_.name,
                 "the loss scale is " + std::to_string(factor) + ", not a number above 0 that fp32 can undo");
  backend_->loss_scale = factor;
}

void Optimizer::maximize(bool on) noexcept { backend_->maximize = on; }

void Optimizer::update_in_backward(bool on) {
  require_option(!on || backend_->max_gradient_norm == 0, kind_.name,
                 "parameters cannot be updated within backward where gradients are clipped (max_gradient_norm)");
  drop_repeated(param_groups_, kind_.name);
  backend_->update_in_backward(on, param_groups_);
}

std::optional<double> Optimizer::gradient_norm() const { return backend_->gradient_norm(); }

std::optional<GradientNorms> Optimizer::newest_gradient_norms() const { return backend_->report().newest(); }

std::int64_t Optimizer::skipped_steps() const { return backend_->report().skipped(); }

at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_graph(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  drop_repeated(param_groups_, kind_.name);  // the program may have added some
  backend_->step(param_groups_);
  return loss;
}

void Optimizer::save(torch::serialize::OutputArchive&) const { refuse_archive(kind_.name); }

void Optimizer::load(torch::serialize::InputArchive&) { refuse_archive(kind_.name); }

void require_option(bool holds, std::string_view kind, const std::string& what) {
  if (!holds) {
    throw LogicError(std::string(kind) + ": " + what);
  }
}

void require_not_negative(double value, std::string_view kind, const std::string& name) {
  require_option(value >= 0 && std::isfinite(static_cast<float>(value)), kind,
                 name + " is " + std::to_string(value) + ", not a finite number of 0 or more");
}

}  // namespace terrace
