/// What an optimizer does with a run of elements: the seam behind which optimizers differ.
///
/// Everything else is common to them: where states lie and how they come, norms, clipping, skipping, the queue. A new
/// optimizer is a rule, and a frontend that makes one of its options.
///
/// Immutable: any thread may call it, for distinct runs at the same time.
#pragma once

#include <cstdint>

#include "optimizer/update_run.h"

namespace terrace {

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  /// `step` counts this update of the elements: 1 for the first, whose states are zeros. Gradients count
  /// `gradient_scale` times: what clips them, and what undoes a factor that the loss was scaled by. An element's result
  /// depends on that element alone. Allocates nothing, and throws nothing
  /// for a run that `require_updatable` takes and a step from 1 on; LogicError, before anything changes, for others.
  virtual void update(std::int64_t step, float gradient_scale, const UpdateRun& run) const = 0;
};

}  // namespace terrace
