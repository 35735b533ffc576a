#include "optimizer/adamw.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "optimizer/prefetching.h"

// Highway compiles this file once for each instruction set and picks the best one at run time.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#include "optimizer/adamw_formula.inc"
#include "optimizer/kernel.inc"

template <bool scales>
struct AdamWKernel {
  using Step = AdamWStep;
  static constexpr bool keeps_variance = true;
  using Change = AdamWChange<FloatVector>;
  static HWY_INLINE Change update_states(const AdamWStep& step, FloatVector gradient, FloatVector,
                                         FloatVector& momentum, FloatVector& variance) {
    return update_adamw_states<VectorMath, scales>(step, gradient, momentum, variance);
  }
  static HWY_INLINE void update_parameter(const AdamWStep& step, const Change& change, FloatVector& parameter) {
    update_by_adamw<VectorMath>(step, change, parameter);
  }
};

// A step that does not scale its gradients saves a multiplication of each.
void update(const AdamWStep& step, const UpdateRun& run) {
  step.gradient_scale == 1 ? update_by<AdamWKernel<false>>(step, run) : update_by<AdamWKernel<true>>(step, run);
}

const char* instruction_set() { return hwy::TargetName(HWY_TARGET); }

// (1 + e)(1 - e) - 1 is -e^2 with one rounding and 0 with two.
bool uses_fma() {
  const Floats d;
  const float e = 0x1p-13f;
  return hn::GetLane(hn::MulAdd(hn::Set(d, 1 + e), hn::Set(d, 1 - e), hn::Set(d, -1.0f))) != 0.0f;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace {
HWY_EXPORT(update);
HWY_EXPORT(instruction_set);
HWY_EXPORT(uses_fma);
}  // namespace

AdamWStep::AdamWStep(const AdamWOptions& options, std::int64_t step, float scale)
    : gradient_scale(options.maximize ? -scale : scale),
      decay(static_cast<float>(1 - options.learning_rate * options.weight_decay)),
      beta1(static_cast<float>(options.beta1)),
      one_minus_beta1(static_cast<float>(1 - options.beta1)),
      beta2(static_cast<float>(options.beta2)),
      one_minus_beta2(static_cast<float>(1 - options.beta2)),
      inverse_root_bias_correction2(
          static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, static_cast<double>(step))))),
      epsilon(static_cast<float>(options.epsilon)),
      step_size(
          static_cast<float>(-(options.learning_rate / (1 - std::pow(options.beta1, static_cast<double>(step)))))),
      seed(static_cast<std::uint32_t>(step) * 0x9e3779b9u) {
  require_counted(step);
}

void adamw_update(const AdamWStep& step, const UpdateRun& run) {
  require_updatable(run, /*keeps_variance=*/true);
  HWY_DYNAMIC_DISPATCH(update)(step, run);
}

void adamw_update(const AdamWStep& step, const UpdateRun& run, const UpdateThreads& threads) {
  require_updatable(run, /*keeps_variance=*/true);
  for_each_part(run, threads, [&](const UpdateRun& part) { adamw_update(step, part); });
}

void AdamWRule::update(std::int64_t step, float gradient_scale, const UpdateRun& run) const {
  adamw_update(AdamWStep(options_, step, gradient_scale), run);
}

const char* adamw_instruction_set() { return HWY_DYNAMIC_DISPATCH(instruction_set)(); }

bool adamw_uses_fma() { return HWY_DYNAMIC_DISPATCH(uses_fma)(); }

}  // namespace terrace
#endif
