/// How an optimizer reaches its parameters: managed chunks, or ordinary tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "integration/optimizer.h"
#include "optimizer/update_rule.h"

namespace terrace {

/// What tells one kind of optimizer from another.
struct OptimizerKind {
  std::string_view name;  ///< as optimizer_states.h knows it
  /// The rule of a group with these options. Throws LogicError for options of another optimizer or out of range.
  std::shared_ptr<const UpdateRule> (*rule)(const torch::optim::OptimizerOptions& options, bool maximize);
};

/// Throws LogicError, in the name of the kind of optimizer, unless it `holds`.
void require_option(bool holds, std::string_view kind, const std::string& what);

/// The same of an option that is 0 or more, by its name in the message.
void require_not_negative(double value, std::string_view kind, const std::string& name);

/// The options as those of a kind. Throws LogicError if they are not.
template <class Options>
const Options& options_of(const torch::optim::OptimizerOptions& options, std::string_view kind) {
  const auto* const own = dynamic_cast<const Options*>(&options);
  require_option(own != nullptr, kind, "the options of a group are another optimizer's");
  return *own;
}

class OptimizerBackend {
 public:
  explicit OptimizerBackend(const OptimizerKind& kind) : kind_(kind) {}
  virtual ~OptimizerBackend() = default;
  OptimizerBackend(const OptimizerBackend&) = delete;
  OptimizerBackend& operator=(const OptimizerBackend&) = delete;

  /// One update of all parameters in `groups` that have a gradient.
  virtual void step(Optimizer::Groups& groups) = 0;
  /// Where one has joined them.
  virtual void notice_groups(Optimizer::Groups&) {}
  /// As Optimizer says.
  virtual std::optional<double> gradient_norm() const = 0;
  virtual void update_in_backward(bool on, Optimizer::Groups& groups) = 0;
  virtual bool updates_in_backward() const noexcept = 0;

  const GradientReport& report() const noexcept { return *report_; }

  double max_gradient_norm = 0;
  double loss_scale = 1;
  bool maximize = false;

 protected:
  std::shared_ptr<const UpdateRule> rule_of(const torch::optim::OptimizerParamGroup& group) const {
    return kind_.rule(group.options(), maximize);
  }

  const OptimizerKind& kind_;
  const std::shared_ptr<GradientReport> report_ = std::make_shared<GradientReport>();
  std::int64_t steps_ = 0;
};

/// `joins_all`: parameters managed later join the first group. Throws LogicError for a managed parameter in `groups`
/// that cannot be updated, by its name.
std::unique_ptr<OptimizerBackend> make_managed_backend(const OptimizerKind& kind, Session& session,
                                                       const Optimizer::Groups& groups, bool joins_all);
std::unique_ptr<OptimizerBackend> make_ordinary_backend(const OptimizerKind& kind, Optimizer::Groups& groups,
                                                        const Config::Optimizer& config);

}  // namespace terrace
