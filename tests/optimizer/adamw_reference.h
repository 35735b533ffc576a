/// AdamW for one element in plain scalar C++: what optimizer/adamw.h states, to hold its kernels against.
#pragma once

#include <cmath>
#include <cstdint>

#include "optimizer/adamw.h"
#include "optimizer/bfloat16.h"

namespace terrace::reference {

inline void adamw(const AdamWStep& step, float& parameter, float gradient, float& momentum, float& variance) {
  const float g = gradient * step.gradient_scale;
  momentum = std::fma(g, step.one_minus_beta1, momentum * step.beta1);
  variance = std::fma(step.one_minus_beta2 * g, g, variance * step.beta2);
  const float denominator = std::sqrt(variance) / step.root_bias_correction2 + step.epsilon;
  const float decayed = parameter * step.decay;
  parameter = decayed + step.step_size * momentum / denominator;
}

inline void adamw(const AdamWStep& step, std::uint16_t& parameter, std::uint16_t gradient, float& master,
                  float& momentum, float& variance) {
  if (float_to_bfloat16(master) != parameter) master = bfloat16_to_float(parameter);
  adamw(step, master, bfloat16_to_float(gradient), momentum, variance);
  parameter = float_to_bfloat16(master);
}

}  // namespace terrace::reference
