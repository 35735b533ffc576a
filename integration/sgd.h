/// Stochastic gradient descent with momentum, over what a session manages or over ordinary tensors: the arithmetic of
/// torch::optim::SGD, bit for bit where multiply-add rounds once. (With dampening, a momentum that is 0 at first
/// differs: optimizer/sgd.h.)
///
/// It keeps a momentum of each parameter, also where its factor is 0, and no variance.
#pragma once

#include <vector>

#include <torch/csrc/api/include/torch/optim/sgd.h>

#include "integration/optimizer.h"

namespace terrace {

class SGD : public Optimizer {
 public:
  using Options = torch::optim::SGDOptions;

  /// Updates all that the session manages, frozen or not; what it manages later joins the first group at the next step.
  SGD(Session& session, Options defaults);
  /// Updates the managed parameters of the groups.
  SGD(Session& session, const Groups& groups, Options defaults);
  /// Without a session: updates ordinary tensors at once, as `[optimizer]` of a configuration says.
  SGD(std::vector<at::Tensor> parameters, Options defaults, const Config::Optimizer& config = {});
  SGD(const Groups& groups, Options defaults, const Config::Optimizer& config = {});
};

}  // namespace terrace
