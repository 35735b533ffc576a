// An optimizer over managed chunks: copies what the update needs into a job and queues it.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "integration/backward_watch.h"
#include "integration/last_gradients.h"
#include "integration/optimizer_backend.h"
#include "integration/optimizer_states.h"
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

class Managed final : public OptimizerBackend {
 public:
  Managed(const OptimizerKind& kind, const std::shared_ptr<SessionState>& state, const Optimizer::Groups& groups,
          bool joins_all)
      : OptimizerBackend(kind), state_(state), joins_all_(joins_all) {
    const auto held = state->lock();
    state->take_in_replaced();
    for (const auto& group : groups) {
      for (const at::Tensor& tensor : group.params()) {
        const ManagedParameter* const parameter = state->find(tensor);
        // What is frozen, and nobody has named, may lose the gradient that it has before the first step.
        if (parameter != nullptr && (parameter->gradient_chunk || !joins_all)) {
          require_updatable(*parameter);
        }
      }
    }
    state->add_optimizer_chunks(keeps_variance(kind_.name));
    joined_ = state->parameters().empty() ? 0 : state->parameters().back().number;
  }

  ~Managed() override {
    // What it has learned goes with it: another optimizer begins anew.
    if (const std::shared_ptr<SessionState> state = state_.lock()) {
      const auto held = state->lock();
      for (ManagedParameter& parameter : state->parameters()) {
        if (parameter.optimizer == this) {
          parameter.forget_updates();
        }
      }
      watch_.end(*state);
      last_gradients_.end(*state);
    }
  }
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;

  void step(Optimizer::Groups& groups) override {
    const std::shared_ptr<SessionState> state = session();
    const OpScope scope("Optimizer::step");
    const auto held = state->lock();
    state->require_not_gathered("step", sets_with_gradients(*state, groups));
    state->require_whole();
    if (!updates_in_backward()) {
      state->updates().settle();  // which decides whether the step before counts
      state->updates().throw_refusal_of(report_.get());
    }
    state->gradients().notice_dead_storages();
    state->take_in_replaced();
    if (joins_all_) {
      join_new_parameters(*state, groups);
      if (steps_ == 0 && state->parameters().empty()) {
        throw LogicError(std::string(kind_.name) + ": the session manages no parameters to update",
                         "call Session::manage with the model before the first step");
      }
    }
    state->add_optimizer_chunks(keeps_variance(kind_.name));

    Update update = new_update(*state, groups.size());
    for (const Wanted& each : what_to_update(*state, groups)) {
      add(update, *state, *each.parameter, each.rule, each.group);
    }
    ++steps_;
    if (updates_in_backward()) {
      add_to_queue(*state, std::move(update));
      watch_.begin(*state, groups);
      state->updates().keep_few();
    } else {
      expect_like(*state, update);
      ticket_ = state->updates().submit(std::move(update.job));
      bump_versions(update.parameters);
    }
    state->end_step(!updates_in_backward());
    if (state->updates_at_once()) {
      state->updates().throw_refusal_of(report_.get());
    }
  }

  std::optional<double> gradient_norm() const override {
    const std::shared_ptr<SessionState> state = state_.lock();
    if (!state) {
      return std::nullopt;
    }
    const OpScope scope("Optimizer::gradient_norm");
    const auto held = state->lock();
    return ticket_ ? state->updates().norm(ticket_) : std::nullopt;
  }

  void update_in_backward(bool on, Optimizer::Groups& groups) override {
    const std::shared_ptr<SessionState> state = session();
    const auto held = state->lock();
    require_option(!on || state->non_finite() == NonFinite::pass, kind_.name,
                   "parameters cannot be updated within backward where steps may be skipped (optimizer.non_finite)");
    state->updates().settle();
    state->take_in_replaced();
    state->add_optimizer_chunks(keeps_variance(kind_.name));
    ticket_.reset();
    last_gradients_.end(*state);
    if (on) {
      watch_.begin(*state, groups);
    } else {
      watch_.end(*state);
    }
    groups_ = on ? &groups : nullptr;
  }

  bool updates_in_backward() const noexcept override { return groups_ != nullptr; }

 private:
  /// An update in the making, and whose gradients it holds.
  struct Update {
    UpdateJob job;
    std::vector<ManagedParameter*> parameters;
  };

  struct Wanted {
    ManagedParameter* parameter;
    std::shared_ptr<const UpdateRule> rule;
    std::size_t group;
  };

  /// What has a gradient. Throws, before anything changes, where some of it cannot be updated.
  std::vector<Wanted> what_to_update(SessionState& state, const Optimizer::Groups& groups) const {
    std::vector<Wanted> wanted;
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const std::shared_ptr<const UpdateRule> rule = rule_of(groups[group]);
      const auto& tensors = groups[group].params();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].grad().defined() && tensors[i].numel() != 0) {
          ManagedParameter& parameter = managed(state, tensors[i], group, i);
          require_own(parameter);
          Gradients::require_fits(parameter, tensors[i].grad());
          wanted.push_back({&parameter, rule, group});
        }
      }
    }
    return wanted;
  }

  std::shared_ptr<SessionState> session() const {
    std::shared_ptr<SessionState> state = state_.lock();
    require_option(state != nullptr, kind_.name, "the session of this optimizer has ended");
    return state;
  }

  Update new_update(SessionState& state, std::size_t groups) const {
    return {.job = {.segments = {},
                    .groups = groups,
                    .max_gradient_norm = max_gradient_norm,
                    .loss_scale = loss_scale,
                    .non_finite = state.non_finite(),
                    .step = steps_ + 1,
                    .report = report_},
            .parameters = {}};
  }

  void add(Update& update, SessionState& state, ManagedParameter& parameter, std::shared_ptr<const UpdateRule> rule,
           std::size_t group) {
    take_over(parameter);
    auto gradient = std::make_shared<const HeldGradient>(state.gradients().for_update(parameter),
                                                         state.gradients().weak_from_this());
    update.job.segments.push_back({.chunks = state.chunk_sets()[parameter.chunk_set],
                                   .element_offset = parameter.element_offset,
                                   .elements = parameter.elements,
                                   .rule = std::move(rule),
                                   .updates = parameter.updates,
                                   .parameter = parameter.name,
                                   .group = group,
                                   .gradient = std::move(gradient)});
    update.parameters.push_back(&parameter);
  }

  /// Where the norm is wanted, gradients of the next step are summed up as soon as backward is done with them.
  void expect_like(SessionState& state, const Update& update) {
    gradients_of_.clear();
    if (!update.job.needs_norm()) {
      last_gradients_.end(state);
      return;
    }
    for (std::size_t i = 0; i < update.parameters.size(); ++i) {
      const Segment& segment = update.job.segments[i];
      GradientsOfSet& gradients = gradients_of_[update.parameters[i]->chunk_set];
      gradients.chunk = segment.chunks.gradient.value();
      gradients.type = segment.chunks.gradient_type;
      gradients.runs.push_back({segment.element_offset, segment.elements});
    }
    last_gradients_.begin_step(update.parameters);
  }

  /// Backward seems to be done with the gradients of this set of chunks.
  void sum_up(std::uint32_t chunk_set) {
    const std::shared_ptr<SessionState> state = session();
    if (const auto found = gradients_of_.find(chunk_set); found != gradients_of_.end()) {
      const GradientsOfSet& gradients = found->second;
      state->updates().expect_job_with(gradients.chunk, gradients.type, gradients.runs);
    }
  }

  /// The queue holds the gradients from now on, nobody else.
  void add_to_queue(SessionState& state, Update update) {
    state.updates().add(std::move(update.job));
    for (ManagedParameter* parameter : update.parameters) {
      parameter->tensor.mutable_grad().reset();
      watch_.use_up(*parameter);
    }
    bump_versions(update.parameters);
  }

  static void bump_versions(const std::vector<ManagedParameter*>& updated) {
    for (ManagedParameter* parameter : updated) {
      parameter->tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  /// The group that has it now: the program may have changed them since the step began. None where it has left.
  std::optional<std::size_t> group_of(SessionState& state, const BackwardWatch::Member& member) const {
    const auto is_it = [&](const at::Tensor& tensor) { return state.find(tensor) == member.parameter; };
    if (member.group < groups_->size()) {
      const auto& tensors = (*groups_)[member.group].params();
      if (member.position < tensors.size() && is_it(tensors[member.position])) {
        return member.group;
      }
    }
    const auto has_it = [&](const auto& group) {
      return std::any_of(group.params().begin(), group.params().end(), is_it);
    };
    const auto found = std::find_if(groups_->begin(), groups_->end(), has_it);
    return found == groups_->end() ? std::nullopt : std::optional(static_cast<std::size_t>(found - groups_->begin()));
  }

  /// A backward has added a gradient to what is watched.
  void note_gradient(const ManagedParameter& parameter) {
    for (const BackwardWatch::Members* members : watch_.completed_by(parameter)) {
      update_within_backward(*members);
    }
  }

  /// Of one set of chunks.
  void update_within_backward(const BackwardWatch::Members& members) {
    const std::shared_ptr<SessionState> state = session();
    state->require_not_gathered("update_in_backward", {members.front().parameter->chunk_set});
    const at::NoGradGuard no_grad;
    Update update = new_update(*state, groups_->size());
    std::map<std::size_t, std::shared_ptr<const UpdateRule>> rules;  // by group
    for (const BackwardWatch::Member& member : members) {
      const std::optional<std::size_t> group =
          member.parameter->tensor.grad().defined() ? group_of(*state, member) : std::nullopt;
      if (group) {
        std::shared_ptr<const UpdateRule>& rule = rules[*group];
        if (rule == nullptr) {
          rule = rule_of((*groups_)[*group]);
        }
        add(update, *state, *member.parameter, rule, *group);
      }
    }
    if (update.parameters.empty()) {
      return;
    }
    add_to_queue(*state, std::move(update));
    state->updates().keep_few();
  }

  ManagedParameter& managed(SessionState& state, const at::Tensor& tensor, std::size_t group, std::size_t i) const {
    ManagedParameter* parameter = state.find(tensor);
    const std::string which = "parameter " + std::to_string(i) + " of group " + std::to_string(group);
    if (parameter == nullptr) {
      throw LogicError(std::string(kind_.name) + ": " + which + " has a gradient and is not managed by the session",
                       "call Session::manage on its module");
    }
    require_updatable(*parameter);
    return *parameter;
  }

  /// The sets of chunks that a step changes.
  std::set<std::uint32_t> sets_with_gradients(SessionState& state, const Optimizer::Groups& groups) const {
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
    require_own(parameter);
    parameter.optimizer = this;
    parameter.updated_by = kind_.name;
  }

  /// That no other optimizer has them.
  void require_own(const ManagedParameter& parameter) const {
    if (parameter.optimizer != nullptr && parameter.optimizer != this) {
      throw LogicError(
          std::string(kind_.name) + ": '" + parameter.name + "' is updated by another optimizer of the session already",
          "let optimizers have disjoint parameters, or end the other one first");
    }
    if (*parameter.updates > 0 && parameter.updated_by != kind_.name) {
      throw LogicError(std::string(kind_.name) + ": the checkpoint's states of '" + parameter.name + "' are those of " +
                           parameter.updated_by,
                       "go on with " + parameter.updated_by);
    }
  }

  void require_updatable(const ManagedParameter& parameter) const {
    const at::ScalarType type = parameter.tensor.scalar_type();
    if (parameter.gradient_chunk && type != at::kFloat && type != at::kBFloat16) {
      throw LogicError(std::string(kind_.name) + " updates float32 and bfloat16 parameters; '" + parameter.name +
                       "' is " + c10::toString(type));
    }
    if (!parameter.gradient_chunk && parameter.tensor.grad().defined()) {
      throw LogicError(std::string(kind_.name) + ": '" + parameter.name + "' has a gradient and does not require one",
                       "call set_requires_grad(true) on what is to be trained");
    }
  }

  /// Parameters that are managed since the last step join the default group, but for those that are in a group already.
  void join_new_parameters(SessionState& state, Optimizer::Groups& groups) {
    const auto& parameters = state.parameters();
    const auto is_in_a_group = [&](const at::Tensor& tensor) {
      return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(),
                           [&](const at::Tensor& member) { return member.is_same(tensor); });
      });
    };
    std::for_each(parameters.begin(), parameters.end(), [&](const auto& parameter) { require_updatable(parameter); });
    for (const ManagedParameter& parameter : parameters) {
      if (parameter.number > joined_ && !is_in_a_group(parameter.tensor)) {
        groups.at(0).params().push_back(parameter.tensor);
      }
    }
    joined_ = parameters.empty() ? joined_ : parameters.back().number;
  }

  const std::weak_ptr<SessionState> state_;
  const bool joins_all_;
  std::uint64_t joined_ = 0;  ///< the session's parameters up to that number have had their group
  UpdateTicket ticket_;
  // Where the norm is wanted.
  struct GradientsOfSet {
    ChunkId chunk = 0;
    ElementType type = ElementType::float32;
    std::vector<GradientRun> runs;
  };
  std::map<std::uint32_t, GradientsOfSet> gradients_of_;  ///< in the last step, by set of chunks
  LastGradients last_gradients_{[this](std::uint32_t chunk_set) { sum_up(chunk_set); }};
  // Where parameters are updated within backward.
  Optimizer::Groups* groups_ = nullptr;  ///< null: they are not
  BackwardWatch watch_{kind_.name, [this](const ManagedParameter& parameter) { note_gradient(parameter); }};
};

}  // namespace

std::unique_ptr<OptimizerBackend> make_managed_backend(const OptimizerKind& kind, Session& session,
                                                       const Optimizer::Groups& groups, bool joins_all) {
  return std::make_unique<Managed>(kind, session.state(), groups, joins_all);
}

}  // namespace terrace
