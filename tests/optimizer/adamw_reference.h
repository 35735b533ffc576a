/// AdamW for one element in plain scalar C++: what optimizer/adamw.h states, to hold its kernels against.
#pragma once

#include <cmath>
#include <cstdint>

#include "optimizer/adamw.h"
#include "optimizer/bfloat16.h"
#include "optimizer/float16.h"

namespace terrace::reference {

#include "optimizer/adamw_formula.inc"

struct ScalarMath {
  static float set(float value) { return value; }
  static float add(float a, float b) { return a + b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static float sqrt(float a) { return std::sqrt(a); }
  static float mul_add(float a, float b, float c) { return std::fma(a, b, c); }
};

inline float widened(float value, ElementType) { return value; }
inline float widened(std::uint16_t bits, ElementType type) {
  return type == ElementType::float16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

inline void store_momentum(float value, const AdamWStep&, float& to) { to = value; }
inline void store_momentum(float value, const AdamWStep&, std::uint16_t& to) { to = float_to_bfloat16(value); }
inline void store_variance(float value, const AdamWStep&, float& to) { to = value; }
inline void store_variance(float value, const AdamWStep& step, std::uint16_t& to) {
  to = float_to_bfloat16_at_random(value, step.seed);
}

// The master of a parameter, and what becomes of both.
inline float master_of(float parameter, float) { return parameter; }
inline float master_of(std::uint16_t parameter, float master) {
  return float_to_bfloat16(master) == parameter ? master : bfloat16_to_float(parameter);
}
inline float master_of(std::uint16_t parameter, std::uint16_t master) { return joined(parameter, master); }
inline void store_master(float value, float& parameter, float&) { parameter = value; }
inline void store_master(float value, std::uint16_t& parameter, float& master) {
  parameter = float_to_bfloat16(value);
  master = value;
}
inline void store_master(float value, std::uint16_t& parameter, std::uint16_t& master) {
  parameter = float_to_bfloat16(value);
  master = lower_half(value);
}

template <class Parameter, class Gradient, class Master, class Moment>
void adamw(const AdamWStep& step, Parameter& parameter, Gradient gradient, ElementType gradient_type, Master& master,
           Moment& momentum, Moment& variance) {
  float w = master_of(parameter, master);
  float m = widened(momentum, ElementType::bfloat16);
  float v = widened(variance, ElementType::bfloat16);
  const auto change = update_adamw_states<ScalarMath>(step, widened(gradient, gradient_type), m, v);
  update_by_adamw<ScalarMath>(step, change, w);
  store_master(w, parameter, master);
  store_momentum(m, step, momentum);
  store_variance(v, step, variance);
}

}  // namespace terrace::reference
