/// How AdamW reaches its parameters: managed chunks, or ordinary tensors.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "integration/adamw.h"
#include "optimizer/adamw.h"

namespace terrace {

class AdamWBackend {
 public:
  virtual ~AdamWBackend() = default;
  /// One update of all parameters in `groups` that have a gradient. Returns the gradient norm before
  /// clipping; nothing where `max_gradient_norm` is 0.
  virtual std::optional<double> step(AdamW::Groups& groups, double max_gradient_norm) = 0;

  double max_gradient_norm = 0;
  std::optional<double> gradient_norm;
};

/// The group's options, checked. Throws LogicError.
AdamWOptions checked_options(const torch::optim::OptimizerParamGroup& group);

/// `joins_all`: parameters managed later join the first group. Throws LogicError for a managed parameter in `groups`
/// that AdamW cannot update, by its name.
std::unique_ptr<AdamWBackend> make_managed_backend(Session& session, const AdamW::Groups& groups, bool joins_all);
std::unique_ptr<AdamWBackend> make_ordinary_backend();

}  // namespace terrace
