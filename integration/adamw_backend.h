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
  /// One update of all parameters in `groups` that have a gradient, clipped to `max_gradient_norm`.
  virtual void step(AdamW::Groups& groups) = 0;
  /// The gradient norm before clipping of the last step; nothing where it was not clipped.
  virtual std::optional<double> gradient_norm() const = 0;

  double max_gradient_norm = 0;
  bool maximize = false;
};

/// The group's options, checked. Throws LogicError.
AdamWOptions checked_options(const torch::optim::OptimizerParamGroup& group, bool maximize = false);

/// `joins_all`: parameters managed later join the first group. Throws LogicError for a managed parameter in `groups`
/// that AdamW cannot update, by its name.
std::unique_ptr<AdamWBackend> make_managed_backend(Session& session, const AdamW::Groups& groups, bool joins_all);
std::unique_ptr<AdamWBackend> make_ordinary_backend(StateFormat states);

}  // namespace terrace
