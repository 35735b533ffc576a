/// One AdamW update of a run of elements, vectorised for the CPU that it runs on.
///
/// AdamW is Adam (Kingma & Ba, 2015) with decoupled weight decay (Loshchilov & Hutter, 2019). In fp32, with one
/// rounding for each operation (`fma` is one) and one for each coefficient in parentheses:
///
///     g *= gradient_scale
///     m  = fma(g, (1 - beta1), m * beta1)
///     v  = fma((1 - beta2) * g, g, v * beta2)
///     d  = fma(sqrt(v), (1 / sqrt(1 - beta2^t)), epsilon)
///     p  = p * (1 - learning_rate * weight_decay) + (-learning_rate / (1 - beta1^t)) * m / d
///
/// What it promises:
///   - An element's result depends on that element alone: not on its position, on `count`, on alignment, or on where a
///     run is cut into calls.
///   - Every instruction set with fused multiply-add gives the same bits. Older x86 (SSE) rounds `fma` twice;
///     `adamw_uses_fma` tells.
///   - fp32 moments are LibTorch's, bit for bit, where its kernels round a multiplication and addition once (AVX2,
///     AVX-512). fp32 parameters after a step from the same ones are LibTorch's, or next to those, where they change by
///     no more than a 16th; where they change by more, 10 * 2^-24 of the change may come on top: it rounds d once more,
///     and its square root is not the nearest.
///   - NaN, infinity and subnormal numbers go through the arithmetic as IEEE 754 says; nothing is skipped or replaced.
///     Threads that round otherwise or flush subnormal numbers do so here too; parts of UpdateThreads do not.
///
/// Pure functions: any thread may call them, at the same time on distinct arrays. Allocates nothing. Throws LogicError,
/// before anything changes, for a run that `require_updatable` refuses and a step below 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizer/update_rule.h"
#include "optimizer/update_run.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// `torch::optim::AdamWOptions` with the betas by name and without defaults.
struct AdamWOptions {
  double learning_rate;
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  bool maximize = false;  ///< goes up the gradient
};

/// The coefficients of one step, computed in double as LibTorch does and rounded to fp32 once.
struct AdamWStep {
  /// `step` is the count that includes this step: 1 for the first one. `gradient_scale` is the clip coefficient;
  /// 1 means none. A factor that gradients were scaled by is undone by it too.
  AdamWStep(const AdamWOptions& options, std::int64_t step, float gradient_scale = 1.0f);

  float gradient_scale;  // negative to maximize
  float decay;           // 1 - learning_rate * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_root_bias_correction2;  // 1 / sqrt(1 - beta2^step)
  float epsilon;
  float step_size;     // -learning_rate / (1 - beta1^step)
  std::uint32_t seed;  // of what is rounded at random in this step
};

void adamw_update(const AdamWStep& step, const UpdateRun& run);
/// The same, in parts on several threads. Allocates.
void adamw_update(const AdamWStep& step, const UpdateRun& run, const UpdateThreads& threads);

/// AdamW with options as they are at a step.
class AdamWRule final : public UpdateRule {
 public:
  explicit AdamWRule(const AdamWOptions& options) : options_(options) {}
  void update(std::int64_t step, float gradient_scale, const UpdateRun& run) const override;

 private:
  const AdamWOptions options_;
};

/// The instruction set that `adamw_update` runs with here, as Highway names it ("AVX2", "AVX3", "NEON").
const char* adamw_instruction_set();

/// Whether that instruction set multiplies and adds with one rounding.
bool adamw_uses_fma();

}  // namespace terrace
