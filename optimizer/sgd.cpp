#include "optimizer/sgd.h"

#include <cstring>
#include <type_traits>

#include "optimizer/prefetching.h"

// Highway compiles this file once for each instruction set and picks the best one at run time.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/sgd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#include "optimizer/kernel.inc"
#include "optimizer/sgd_formula.inc"

struct SgdKernel {
  using Step = SgdStep;
  static constexpr bool keeps_variance = false;
  using Change = FloatVector;
  static HWY_INLINE Change update_states(const SgdStep& step, FloatVector gradient, FloatVector parameter,
                                         FloatVector& momentum, FloatVector&) {
    const Change change = update_sgd_momentum<VectorMath>(step, gradient, parameter, momentum);
    momentum = with_short_nans(momentum);  // a parameter's may be in it
    return change;
  }
  static HWY_INLINE void update_parameter(const SgdStep& step, const Change& change, FloatVector& parameter) {
    update_by_sgd<VectorMath>(step, change, parameter);
  }
};

void update(const SgdStep& step, const UpdateRun& run) { update_by<SgdKernel>(step, run); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace {
HWY_EXPORT(update);
}  // namespace

SgdStep::SgdStep(const SgdOptions& options, std::int64_t step, float scale)
    : gradient_scale(options.maximize ? -scale : scale),
      weight_decay(static_cast<float>(options.weight_decay)),
      momentum(static_cast<float>(options.momentum)),
      new_part(step == 1 ? 1.0f : static_cast<float>(1 - options.dampening)),
      minus_learning_rate(static_cast<float>(-options.learning_rate)),
      nesterov(options.nesterov) {
  require_counted(step);
}

void sgd_update(const SgdStep& step, const UpdateRun& run) {
  require_updatable(run, /*keeps_variance=*/false);
  HWY_DYNAMIC_DISPATCH(update)(step, run);
}

void SgdRule::update(std::int64_t step, float gradient_scale, const UpdateRun& run) const {
  sgd_update(SgdStep(options_, step, gradient_scale), run);
}

}  // namespace terrace
#endif
