/// AdamW over what a session manages, or over ordinary tensors: the same arithmetic, bit for bit.
///
/// Moments are those of torch::optim::AdamW bit for bit where they are fp32; a step's parameters too, but for few
/// elements, within a unit in their last place and ten 2^-24ths of their change. `amsgrad` throws.
///
/// Decoupled weight decay: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
#pragma once

#include <vector>

#include <torch/csrc/api/include/torch/optim/adamw.h>

#include "integration/optimizer.h"

namespace terrace {

class AdamW : public Optimizer {
 public:
  using Options = torch::optim::AdamWOptions;

  /// Updates all that the session manages, frozen or not; what it manages later joins the first group at the next step.
  explicit AdamW(Session& session, Options defaults = {});
  /// Updates the managed parameters of the groups.
  AdamW(Session& session, const Groups& groups, Options defaults = {});
  /// Without a session: updates ordinary tensors at once, as `[optimizer]` of a configuration says.
  explicit AdamW(std::vector<at::Tensor> parameters, Options defaults = {}, const Config::Optimizer& config = {});
  explicit AdamW(const Groups& groups, Options defaults = {}, const Config::Optimizer& config = {});
};

}  // namespace terrace
