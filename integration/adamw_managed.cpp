// AdamW over managed chunks: copies what the update needs into a job and queues it.

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "integration/adamw_backend.h"
#include "integration/session_state.h"
#include "optimizer/update.h"

namespace terrace {
namespace {

/// A gradient until its update has read it. Residency hears of its end at once: dead bytes need not move.
class HeldGradient {
 public:
  HeldGradient(at::Tensor gradient, const std::shared_ptr<SessionState>& state)
      : gradient_(std::move(gradient)), state_(state) {}
  ~HeldGradient() {
    gradient_.reset();
    if (const std::shared_ptr<SessionState> state = state_.lock()) {
      state->notice_dead_storages();
    }
  }
  HeldGradient(const HeldGradient&) = delete;
  HeldGradient& operator=(const HeldGradient&) = delete;

 private:
  at::Tensor gradient_;
  const std::weak_ptr<SessionState> state_;
};

class Managed final : public AdamWBackend {
 public:
  Managed(const std::shared_ptr<SessionState>& state, const AdamW::Groups& groups, bool joins_all)
      : state_(state), joins_all_(joins_all), joined_(state->parameters().size()) {
    for (const auto& group : groups) {
      for (const at::Tensor& tensor : group.params()) {
        if (const ManagedParameter* parameter = state->find(tensor)) {
          require_updatable(*parameter);
        }
      }
    }
    state->add_optimizer_chunks();
  }

  void step(AdamW::Groups& groups) override {
    const std::shared_ptr<SessionState> state = state_.lock();
    if (!state) {
      throw LogicError("AdamW: the session of this optimizer has ended");
    }
    state->notice_dead_storages();
    if (joins_all_) {
      join_new_parameters(*state, groups);
    }
    state->add_optimizer_chunks();

    UpdateJob job;
    job.max_gradient_norm = max_gradient_norm;
    std::vector<const ManagedParameter*> updated;
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const AdamWOptions options = checked_options(groups[group]);
      const auto& tensors = groups[group].params();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (!tensors[i].grad().defined()) {
          continue;
        }
        ManagedParameter& parameter = managed(*state, tensors[i], group, i);
        auto gradient = std::make_shared<const HeldGradient>(state->gradients().for_update(parameter), state);
        job.segments.push_back({.chunks = state->chunk_sets()[parameter.chunk_set],
                                .element_offset = parameter.element_offset,
                                .elements = parameter.elements,
                                .options = options,
                                .step = steps_[&parameter] + 1,
                                .gradient = std::move(gradient)});
        updated.push_back(&parameter);
      }
    }
    ticket_ = state->update(std::move(job));
    for (const ManagedParameter* parameter : updated) {
      ++steps_[parameter];
      parameter->tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  std::optional<double> gradient_norm() const override {
    const std::shared_ptr<SessionState> state = state_.lock();
    return ticket_ && state ? state->updates().norm(ticket_) : std::nullopt;
  }

 private:
  static ManagedParameter& managed(SessionState& state, const at::Tensor& tensor, std::size_t group, std::size_t i) {
    ManagedParameter* parameter = state.find(tensor);
    const std::string which = "parameter " + std::to_string(i) + " of group " + std::to_string(group);
    if (parameter == nullptr) {
      throw LogicError("AdamW: " + which + " has a gradient and is not managed by the session",
                       "call Session::manage on its module; if it was, its storage has been replaced since");
    }
    require_updatable(*parameter);
    return *parameter;
  }

  static void require_updatable(const ManagedParameter& parameter) {
    const at::ScalarType type = parameter.tensor.scalar_type();
    if (parameter.gradient_chunk && type != at::kFloat && type != at::kBFloat16) {
      throw LogicError("AdamW updates float32 and bfloat16 parameters; '" + parameter.name + "' is " +
                       c10::toString(type));
    }
    if (!parameter.gradient_chunk && parameter.tensor.grad().defined()) {
      throw LogicError("AdamW: '" + parameter.name + "' has a gradient, and needed none when it came under management",
                       "set requires_grad before Session::manage");
    }
  }

  /// Parameters managed since the last step join the default group, but for those that are in a group already.
  void join_new_parameters(SessionState& state, AdamW::Groups& groups) {
    const auto& parameters = state.parameters();
    const auto is_in_a_group = [&](const at::Tensor& tensor) {
      return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(),
                           [&](const at::Tensor& member) { return member.is_same(tensor); });
      });
    };
    for (; joined_ < parameters.size(); ++joined_) {
      const ManagedParameter& parameter = parameters[joined_];
      if (parameter.gradient_chunk && !is_in_a_group(parameter.tensor)) {
        groups.at(0).params().push_back(parameter.tensor);
      }
    }
    for (const ManagedParameter& parameter : parameters) {
      require_updatable(parameter);  // it may have been unfrozen
    }
  }

  const std::weak_ptr<SessionState> state_;
  const bool joins_all_;
  std::size_t joined_;  ///< how many of the session's parameters have been looked at
  std::unordered_map<const ManagedParameter*, std::int64_t> steps_;
  UpdateTicket ticket_;
};

}  // namespace

std::unique_ptr<AdamWBackend> make_managed_backend(Session& session, const AdamW::Groups& groups, bool joins_all) {
  return std::make_unique<Managed>(session.state(), groups, joins_all);
}

}  // namespace terrace
