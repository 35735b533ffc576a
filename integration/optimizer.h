/// What all optimizers of a session have in common: LibTorch's interface, clipping, and what becomes of gradients that
/// are not finite.
///
/// An optimizer takes what its namesake in torch::optim takes, after the session if there is one; `zero_grad`,
/// parameter groups and LibTorch's schedulers work. Parameters are fp32, or bf16 with an fp32 master. Without a session
/// it updates ordinary tensors at once, by the same arithmetic: results are the same, bit for bit.
///
/// Threads: one at a time uses an optimizer, but `newest_gradient_norms` and `skipped_steps` are for any; several
/// optimizers, over parameters of their own, may step at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/api/include/torch/optim/optimizer.h>

#include "base/config.h"
#include "integration/session.h"
#include "optimizer/gradient_report.h"

namespace terrace {

class OptimizerBackend;
struct OptimizerKind;

class Optimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  ~Optimizer() override;

  /// As torch::optim::Optimizer's, and gradients of its parameters are summed up in the type that was asked for.
  /// Without a session `step` refuses sums in bf16 of what joins otherwise, where fp32 was asked for.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Clips by the norm over all parameters, as torch::nn::utils::clip_grad_norm_; 0 (the default) is off, and infinity
  /// has the norm measured and nothing clipped, whatever it is. Gradients themselves keep their values.
  void max_gradient_norm(double norm);

  /// The factor that the loss is multiplied by before `backward`, so that small gradients of 16 bits are not lost; 1
  /// (the default) is none. The next step divides gradients by it, before their norm is taken. A power of two loses
  /// nothing.
  void loss_scale(double factor);

  /// Goes up the gradient from the next step on, or down again, as torch.optim's `maximize` of all groups.
  void maximize(bool on) noexcept;

  /// Updates parameters within `backward`, as soon as the gradients of a chunk are complete, which end with that: no
  /// more than a few chunks of gradients are there at a time. `step` still ends each step, and updates the rest;
  /// results are the same, with groups and options as they are during backward. Throws LogicError without a session,
  /// and together with clipping or `optimizer.non_finite`, which need all gradients first. A second `backward` before
  /// `step` throws where what it would add to is used up: also after one that failed half way, which leaves those
  /// chunks updated.
  void update_in_backward(bool on);

  /// Of the last step, before clipping; nothing where neither `max_gradient_norm` nor `optimizer.non_finite` asks for
  /// it. Waits until it has been found.
  std::optional<double> gradient_norm() const;

  /// Of the newest step whose norms have been found, overall and by group; nothing before a step that was asked for
  /// them, as above. Never waits.
  std::optional<GradientNorms> newest_gradient_norms() const;

  /// How many steps have changed nothing because a gradient was not finite, as far as that is known. Never waits.
  std::int64_t skipped_steps() const;

  /// With a session, returns before the update is done. Throws what an update before has failed with, and where one of
  /// this optimizer was refused for its gradients that; then it is not taken. A parameter that a group lists several
  /// times, as modules do a tied one, is updated once; gradients of another type are converted to the one that they are
  /// summed up in. Throws LogicError, before it updates anything, for a parameter in two groups,
  /// a gradient of another shape or a sparse one, and options out of range. (What `update_in_backward` has updated is.)
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Throw LogicError: states are saved by the session, with the parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  using Defaults = std::unique_ptr<torch::optim::OptimizerOptions>;

  /// Updates all that the session manages, frozen or not; what it manages later joins the first group at the next step.
  /// `kind` lasts.
  Optimizer(const OptimizerKind& kind, Session& session, Defaults defaults);
  /// Updates the managed parameters of the groups.
  Optimizer(const OptimizerKind& kind, Session& session, const Groups& groups, Defaults defaults);
  /// Without a session: updates ordinary tensors at once, as `[optimizer]` of a configuration says. Throws ConfigError
  /// for values that it cannot have.
  Optimizer(const OptimizerKind& kind, std::vector<at::Tensor> parameters, Defaults defaults,
            const Config::Optimizer& config);
  Optimizer(const OptimizerKind& kind, const Groups& groups, Defaults defaults, const Config::Optimizer& config);

 private:
  void check_groups();

  const OptimizerKind& kind_;
  std::unique_ptr<OptimizerBackend> backend_;
};

}  // namespace terrace
