// AdamW over managed chunks: copies what the update needs into a job and queues it.

#include <algorithm>
#include <set>
#include <utility>

#include "base/error.h"
#include "integration/adamw_backend.h"
#include "integration/session_state.h"
#include "memory/current_op.h"
#include "optimizer/update.h"

namespace terrace {
namespace {

/// A gradient until its update has read it. Residency hears of its end at once: dead bytes need not move.
class HeldGradient {
 public:
  HeldGradient(at::Tensor gradient, std::weak_ptr<Gradients> gradients)
      : gradient_(std::move(gradient)), gradients_(std::move(gradients)) {}
  ~HeldGradient() {
    gradient_.reset();
    if (const std::shared_ptr<Gradients> gradients = gradients_.lock()) {
      gradients->notice_dead_storages();
    }
  }
  HeldGradient(const HeldGradient&) = delete;
  HeldGradient& operator=(const HeldGradient&) = delete;

 private:
  at::Tensor gradient_;
  const std::weak_ptr<Gradients> gradients_;
};

class Managed final : public AdamWBackend {
 public:
  Managed(const std::shared_ptr<SessionState>& state, const AdamW::Groups& groups, bool joins_all)
      : state_(state), joins_all_(joins_all) {
    const auto held = state->lock();
    state->take_in_replaced();
    for (const auto& group : groups) {
      for (const at::Tensor& tensor : group.params()) {
        if (const ManagedParameter* parameter = state->find(tensor)) {
          require_updatable(*parameter);
        }
      }
    }
    state->add_optimizer_chunks();
    for (const ManagedParameter& parameter : state->parameters()) {
      joined_.push_back(parameter.gradient_chunk.has_value());  // it is in the groups from the start
    }
  }

  ~Managed() override {
    // What it has learned goes with it: another optimizer begins anew.
    if (const std::shared_ptr<SessionState> state = state_.lock()) {
      const auto held = state->lock();
      for (ManagedParameter& parameter : state->parameters()) {
        if (parameter.optimizer == this) {
          parameter.optimizer = nullptr;
          parameter.updates = 0;
        }
      }
    }
  }
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;

  void step(AdamW::Groups& groups) override {
    const std::shared_ptr<SessionState> state = state_.lock();
    if (!state) {
      throw LogicError("AdamW: the session of this optimizer has ended");
    }
    const OpScope scope("AdamW::step");
    const auto held = state->lock();
    state->require_not_gathered("step", sets_with_gradients(*state, groups));
    state->require_whole();
    state->gradients().notice_dead_storages();
    state->take_in_replaced();
    if (joins_all_) {
      join_new_parameters(*state, groups);
    }
    state->add_optimizer_chunks();

    UpdateJob job;
    job.max_gradient_norm = max_gradient_norm;
    std::vector<ManagedParameter*> updated;
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const AdamWOptions options = checked_options(groups[group], maximize);
      const auto& tensors = groups[group].params();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (!tensors[i].grad().defined() || tensors[i].numel() == 0) {
          continue;
        }
        ManagedParameter& parameter = managed(*state, tensors[i], group, i);
        take_over(parameter);
        auto gradient = std::make_shared<const HeldGradient>(state->gradients().for_update(parameter),
                                                             state->gradients().weak_from_this());
        job.segments.push_back({.chunks = state->chunk_sets()[parameter.chunk_set],
                                .element_offset = parameter.element_offset,
                                .elements = parameter.elements,
                                .options = options,
                                .step = parameter.updates + 1,
                                .gradient = std::move(gradient)});
        updated.push_back(&parameter);
      }
    }
    ticket_ = state->submit(std::move(job));
    for (ManagedParameter* parameter : updated) {
      ++parameter->updates;
      parameter->tensor.unsafeGetTensorImpl()->bump_version();
    }
    state->end_step();
  }

  std::optional<double> gradient_norm() const override {
    const std::shared_ptr<SessionState> state = state_.lock();
    if (!state) {
      return std::nullopt;
    }
    const OpScope scope("AdamW::gradient_norm");
    const auto held = state->lock();
    return ticket_ ? state->updates().norm(ticket_) : std::nullopt;
  }

 private:
  static ManagedParameter& managed(SessionState& state, const at::Tensor& tensor, std::size_t group, std::size_t i) {
    ManagedParameter* parameter = state.find(tensor);
    const std::string which = "parameter " + std::to_string(i) + " of group " + std::to_string(group);
    if (parameter == nullptr) {
      throw LogicError("AdamW: " + which + " has a gradient and is not managed by the session",
                       "call Session::manage on its module");
    }
    require_updatable(*parameter);
    return *parameter;
  }

  /// The sets of chunks that a step changes.
  std::set<std::uint32_t> sets_with_gradients(SessionState& state, const AdamW::Groups& groups) const {
    std::set<std::uint32_t> sets;
    const auto add = [&](const ManagedParameter* parameter) {
      if (parameter != nullptr && parameter->tensor.grad().defined()) {
        sets.insert(parameter->chunk_set);
      }
    };
    for (const auto& group : groups) {
      for (const at::Tensor& tensor : group.params()) {
        add(state.find(tensor));
      }
    }
    if (joins_all_) {
      for (const ManagedParameter& parameter : state.parameters()) {
        add(&parameter);
      }
    }
    return sets;
  }

  /// The states in the parameter's chunks are this optimizer's from now on.
  void take_over(ManagedParameter& parameter) {
    if (parameter.optimizer != nullptr && parameter.optimizer != this) {
      throw LogicError("AdamW: '" + parameter.name + "' is updated by another optimizer of the session already",
                       "let optimizers have disjoint parameters, or end the other one first");
    }
    parameter.optimizer = this;
  }

  static void require_updatable(const ManagedParameter& parameter) {
    const at::ScalarType type = parameter.tensor.scalar_type();
    if (parameter.gradient_chunk && type != at::kFloat && type != at::kBFloat16) {
      throw LogicError("AdamW updates float32 and bfloat16 parameters; '" + parameter.name + "' is " +
                       c10::toString(type));
    }
    if (!parameter.gradient_chunk && parameter.tensor.grad().defined()) {
      throw LogicError("AdamW: '" + parameter.name + "' has a gradient and does not require one",
                       "call set_requires_grad(true) on what is to be trained");
    }
  }

  /// Parameters that are trained since the last step join the default group, but for those that are in a group already.
  void join_new_parameters(SessionState& state, AdamW::Groups& groups) {
    const auto& parameters = state.parameters();
    const auto is_in_a_group = [&](const at::Tensor& tensor) {
      return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(),
                           [&](const at::Tensor& member) { return member.is_same(tensor); });
      });
    };
    joined_.resize(parameters.size(), false);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      require_updatable(parameters[i]);
      if (!joined_[i] && parameters[i].gradient_chunk) {
        joined_[i] = true;
        if (!is_in_a_group(parameters[i].tensor)) {
          groups.at(0).params().push_back(parameters[i].tensor);
        }
      }
    }
  }

  const std::weak_ptr<SessionState> state_;
  const bool joins_all_;
  std::vector<bool> joined_;  ///< which of the session's parameters are in a group
  UpdateTicket ticket_;
};

}  // namespace

std::unique_ptr<AdamWBackend> make_managed_backend(Session& session, const AdamW::Groups& groups, bool joins_all) {
  return std::make_unique<Managed>(session.state(), groups, joins_all);
}

}  // namespace terrace
