/// AdamW over what a session manages, or over ordinary tensors: the same arithmetic, bit for bit.
///
/// It takes what torch::optim::AdamW takes, after the session if there is one; `zero_grad`, parameter groups
/// and LibTorch's schedulers work. Parameters are fp32, or bf16 with an fp32 master. Moments are those of
/// torch::optim::AdamW bit for bit where they are fp32; parameters too, but where LibTorch's square root is off by one
/// unit in the last place, which moves that element's change by at most four. `amsgrad` throws.
///
/// Threads: one at a time uses an AdamW; several, over parameters of their own, may step at once.
///
/// Decoupled weight decay: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/api/include/torch/optim/adamw.h>
#include <torch/csrc/api/include/torch/optim/optimizer.h>

#include "integration/session.h"
#include "optimizer/state_format.h"

namespace terrace {

class AdamWBackend;

class AdamW : public torch::optim::Optimizer {
 public:
  using Options = torch::optim::AdamWOptions;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// Updates all that the session manages, also what it manages later.
  explicit AdamW(Session& session, Options defaults = {});
  /// Updates the managed parameters of the groups.
  AdamW(Session& session, const Groups& groups, Options defaults = {});
  /// Without a session: updates ordinary tensors at once, with states as `optimizer.states` of a session says.
  explicit AdamW(std::vector<at::Tensor> parameters, Options defaults = {}, StateFormat states = StateFormat::float32);
  explicit AdamW(const Groups& groups, Options defaults = {}, StateFormat states = StateFormat::float32);
  ~AdamW() override;

  /// Clips by the norm over all parameters, as torch::nn::utils::clip_grad_norm_; 0 (the default) is off.
  /// Gradients themselves keep their values.
  void max_gradient_norm(double norm);

  /// Goes up the gradient from the next step on, or down again, as torch.optim.AdamW's `maximize` of all groups.
  void maximize(bool on) noexcept;

  /// Of the last step, before clipping; nothing where clipping is off.
  std::optional<double> gradient_norm() const;

  at::Tensor step(LossClosure closure = nullptr) override;

  /// Throw LogicError: moments are saved by the session, with the parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::unique_ptr<AdamWBackend> backend_;
};

}  // namespace terrace
