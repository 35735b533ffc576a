/// Stochastic gradient descent with momentum, in the same kernels as AdamW.
///
/// The arithmetic is that of `torch::optim::SGD`, operation for operation in fp32, with one rounding each (`fma` rounds
/// once); a term whose factor is 0 is left out:
///
///     g *= gradient_scale
///     g  = fma(weight_decay, p, g)
///     m  = fma(g, 1 - dampening, m * momentum)      (g itself at the first step)
///     p  = fma(-learning_rate, nesterov ? fma(momentum, m, g) : m, p)
///
/// Where the momentum's factor is 0 at first, torch takes g itself at the first step that has another, and this does
/// not.
///
/// The method: Polyak, 1964; Nesterov's, as Sutskever et al., "On the importance of initialization and momentum in deep
/// learning", 2013. What adamw.h promises of positions, instruction sets, NaN and threads holds here too. It keeps a
/// momentum, also where its factor is 0, and no variance.
#pragma once

#include <cstdint>

#include "optimizer/update_rule.h"
#include "optimizer/update_run.h"

namespace terrace {

/// `torch::optim::SGDOptions` without defaults.
struct SgdOptions {
  double learning_rate;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize = false;  ///< goes up the gradient
};

/// The coefficients of one step, rounded to fp32 once.
struct SgdStep {
  SgdStep(const SgdOptions& options, std::int64_t step, float gradient_scale = 1.0f);

  float gradient_scale;  // negative to maximize
  float weight_decay;
  float momentum;
  float new_part;  // of the gradient in the momentum: 1 - dampening, or 1 at the first step
  float minus_learning_rate;
  bool nesterov;
};

void sgd_update(const SgdStep& step, const UpdateRun& run);

/// SGD with options as they are at a step.
class SgdRule final : public UpdateRule {
 public:
  explicit SgdRule(const SgdOptions& options) : options_(options) {}
  void update(std::int64_t step, float gradient_scale, const UpdateRun& run) const override;

 private:
  const SgdOptions options_;
};

}  // namespace terrace
