#include "optimizer/adamw.h"

#include <cassert>
#include <cmath>
#include <cstring>

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

using Floats = hn::ScalableTag<float>;
using Words = hn::Rebind<std::uint32_t, Floats>;
using Halves = hn::Rebind<std::uint16_t, Floats>;
constexpr std::size_t kMaxLanes = hn::MaxLanes(Floats());

using FloatVector = hn::Vec<Floats>;
using WordVector = hn::Vec<Words>;

// One vector of the arithmetic in the header; the only place where it is written.
HWY_INLINE void update_vector(const AdamWStep& step, FloatVector gradient, FloatVector& parameter,
                              FloatVector& momentum, FloatVector& variance) {
  const Floats d;
  const auto g = hn::Mul(gradient, hn::Set(d, step.gradient_scale));
  const auto p = hn::Mul(parameter, hn::Set(d, step.decay));
  const auto m = hn::MulAdd(g, hn::Set(d, step.one_minus_beta1), hn::Mul(momentum, hn::Set(d, step.beta1)));
  const auto v = hn::MulAdd(hn::Mul(hn::Set(d, step.one_minus_beta2), g), g, hn::Mul(variance, hn::Set(d, step.beta2)));
  const auto denominator =
      hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, step.root_bias_correction2)), hn::Set(d, step.epsilon));
  parameter = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, step.step_size), m), denominator));
  momentum = m;
  variance = v;
}

// The rule of optimizer/bfloat16.h, in the lower half of each word.
HWY_INLINE WordVector rounded_to_bfloat16(FloatVector value) {
  const Words d;
  const auto bits = hn::BitCast(d, value);
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d, 0x8000u)));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d, 0x0040u));
  return hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), quiet_nan, rounded);
}

HWY_INLINE FloatVector widened(WordVector bfloat16) { return hn::BitCast(Floats(), hn::ShiftLeft<16>(bfloat16)); }

HWY_INLINE void update_lanes(const AdamWStep& step, float* HWY_RESTRICT parameter, const float* HWY_RESTRICT gradient,
                             float* HWY_RESTRICT momentum, float* HWY_RESTRICT variance) {
  const Floats d;
  auto p = hn::LoadU(d, parameter);
  auto m = hn::LoadU(d, momentum);
  auto v = hn::LoadU(d, variance);
  update_vector(step, hn::LoadU(d, gradient), p, m, v);
  hn::StoreU(p, d, parameter);
  hn::StoreU(m, d, momentum);
  hn::StoreU(v, d, variance);
}

HWY_INLINE void update_lanes(const AdamWStep& step, std::uint16_t* HWY_RESTRICT parameter,
                             const std::uint16_t* HWY_RESTRICT gradient, float* HWY_RESTRICT master,
                             float* HWY_RESTRICT momentum, float* HWY_RESTRICT variance) {
  const Floats d;
  const Words d32;
  const Halves d16;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, parameter));
  const auto g = widened(hn::PromoteTo(d32, hn::LoadU(d16, gradient)));
  auto p = hn::LoadU(d, master);
  auto m = hn::LoadU(d, momentum);
  auto v = hn::LoadU(d, variance);
  const auto unchanged = hn::RebindMask(d, hn::Eq(bits, rounded_to_bfloat16(p)));
  p = hn::IfThenElse(unchanged, p, widened(bits));
  update_vector(step, g, p, m, v);
  // The words are below 2^16, so demotion from signed integers does not saturate.
  const auto words = hn::BitCast(hn::RebindToSigned<Words>(), rounded_to_bfloat16(p));
  hn::StoreU(hn::DemoteTo(d16, words), d16, parameter);
  hn::StoreU(p, d, master);
  hn::StoreU(m, d, momentum);
  hn::StoreU(v, d, variance);
}

// Room for the last, incomplete vector of an array: it goes through the same vector code as every other element. The
// padding is ones, which raise no floating point exception.
template <class T>
struct Tail {
  Tail(const T* values, std::size_t count) {
    for (T& lane : lanes) lane = T(1);
    std::memcpy(lanes, values, count * sizeof(T));
  }
  void store(T* values, std::size_t count) const { std::memcpy(values, lanes, count * sizeof(T)); }

  HWY_ALIGN T lanes[kMaxLanes];
};

void update_float(const AdamWStep& coefficients, float* HWY_RESTRICT parameter, const float* HWY_RESTRICT gradient,
                  float* HWY_RESTRICT momentum, float* HWY_RESTRICT variance, std::size_t count) {
  const AdamWStep step = coefficients;  // a copy, which no store below can alias
  const std::size_t lanes = hn::Lanes(Floats());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) update_lanes(step, parameter + i, gradient + i, momentum + i, variance + i);
  if (const std::size_t rest = count - i; rest != 0) {
    Tail<float> p(parameter + i, rest), m(momentum + i, rest), v(variance + i, rest);
    const Tail<float> g(gradient + i, rest);
    update_lanes(step, p.lanes, g.lanes, m.lanes, v.lanes);
    p.store(parameter + i, rest);
    m.store(momentum + i, rest);
    v.store(variance + i, rest);
  }
}

void update_bfloat16(const AdamWStep& coefficients, std::uint16_t* HWY_RESTRICT parameter,
                     const std::uint16_t* HWY_RESTRICT gradient, float* HWY_RESTRICT master,
                     float* HWY_RESTRICT momentum, float* HWY_RESTRICT variance, std::size_t count) {
  const AdamWStep step = coefficients;
  const std::size_t lanes = hn::Lanes(Floats());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    update_lanes(step, parameter + i, gradient + i, master + i, momentum + i, variance + i);
  }
  if (const std::size_t rest = count - i; rest != 0) {
    Tail<std::uint16_t> p(parameter + i, rest);
    const Tail<std::uint16_t> g(gradient + i, rest);
    Tail<float> w(master + i, rest), m(momentum + i, rest), v(variance + i, rest);
    update_lanes(step, p.lanes, g.lanes, w.lanes, m.lanes, v.lanes);
    p.store(parameter + i, rest);
    w.store(master + i, rest);
    m.store(momentum + i, rest);
    v.store(variance + i, rest);
  }
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
HWY_EXPORT(update_float);
HWY_EXPORT(update_bfloat16);
HWY_EXPORT(instruction_set);
HWY_EXPORT(uses_fma);
}  // namespace

AdamWStep::AdamWStep(const AdamWOptions& options, std::int64_t step, float scale)
    : gradient_scale(scale),
      decay(static_cast<float>(1 - options.learning_rate * options.weight_decay)),
      beta1(static_cast<float>(options.beta1)),
      one_minus_beta1(static_cast<float>(1 - options.beta1)),
      beta2(static_cast<float>(options.beta2)),
      one_minus_beta2(static_cast<float>(1 - options.beta2)),
      root_bias_correction2(static_cast<float>(std::sqrt(1 - std::pow(options.beta2, static_cast<double>(step))))),
      epsilon(static_cast<float>(options.epsilon)),
      step_size(
          static_cast<float>(-(options.learning_rate / (1 - std::pow(options.beta1, static_cast<double>(step)))))) {
  assert(step >= 1);
}

void adamw_update(const AdamWStep& step, float* parameter, const float* gradient, float* momentum, float* variance,
                  std::size_t count) {
  HWY_DYNAMIC_DISPATCH(update_float)(step, parameter, gradient, momentum, variance, count);
}

void adamw_update(const AdamWStep& step, std::uint16_t* parameter_bf16, const std::uint16_t* gradient_bf16,
                  float* master, float* momentum, float* variance, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(update_bfloat16)(step, parameter_bf16, gradient_bf16, master, momentum, variance, count);
}

const char* adamw_instruction_set() { return HWY_DYNAMIC_DISPATCH(instruction_set)(); }

bool adamw_uses_fma() { return HWY_DYNAMIC_DISPATCH(uses_fma)(); }

}  // namespace terrace
#endif
