#include "optimizer/adamw.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <type_traits>

#include <hwy/cache_control.h>

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

#include "optimizer/adamw_formula.inc"
#include "optimizer/widening.inc"

struct VectorMath {
  static HWY_INLINE FloatVector set(float value) { return hn::Set(Floats(), value); }
  static HWY_INLINE FloatVector add(FloatVector a, FloatVector b) { return hn::Add(a, b); }
  static HWY_INLINE FloatVector mul(FloatVector a, FloatVector b) { return hn::Mul(a, b); }
  static HWY_INLINE FloatVector div(FloatVector a, FloatVector b) { return hn::Div(a, b); }
  static HWY_INLINE FloatVector sqrt(FloatVector a) { return hn::Sqrt(a); }
  static HWY_INLINE FloatVector mul_add(FloatVector a, FloatVector b, FloatVector c) { return hn::MulAdd(a, b, c); }
};

// ---- bfloat16, as optimizer/bfloat16.h has it

HWY_INLINE FloatVector widened(WordVector bfloat16) { return widened_bfloat16(Words(), bfloat16); }

// Any value, rounded, in the lower half of each word.
HWY_INLINE WordVector rounded(FloatVector value) {
  const Words d;
  const auto bits = hn::BitCast(d, value);
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d, 0x8000u)));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d, 0x0040u));
  return hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), quiet_nan, nearest);
}

// The same of what arithmetic gave from NaNs that were without a lower half: those are quiet, and `added` to their bits
// does not carry.
HWY_INLINE WordVector rounded_result(FloatVector value, WordVector added) {
  return hn::ShiftRight<16>(hn::Add(hn::BitCast(Words(), value), added));
}

HWY_INLINE FloatVector with_short_nans(FloatVector value) {
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(Floats(), hn::Set(Words(), 0x7fc00000u)), value);
}

HWY_INLINE WordVector random_halves(FloatVector value, std::uint32_t seed) {
  const Words d;
  const auto mixed = hn::Xor(hn::BitCast(d, value), hn::Set(d, seed));
  return hn::ShiftRight<16>(hn::Mul(mixed, hn::Set(d, 0x9e3779b1u)));
}

HWY_INLINE FloatVector joined(WordVector upper, WordVector lower) {
  const Words d;
  const hn::RebindToSigned<Words> s;
  const auto rounded_off = hn::ShiftRight<16>(hn::BitCast(s, hn::ShiftLeft<16>(lower)));  // with its sign
  const auto alone = hn::ShiftLeft<16>(upper);
  const auto value = hn::BitCast(Floats(), hn::Add(alone, hn::BitCast(d, rounded_off)));
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(Floats(), alone), value);
}

// ---- What lies in memory

HWY_INLINE WordVector load_halves(const std::uint16_t* from) {
  return hn::PromoteTo(Words(), hn::LoadU(Halves(), from));
}

// The lower half of each word.
HWY_INLINE void store_halves(WordVector words, std::uint16_t* to) {
  hn::StoreU(hn::TruncateTo(Halves(), words), Halves(), to);
}

struct Float32 {
  using Lane = float;
  static HWY_INLINE FloatVector load(const Lane* from) { return hn::LoadU(Floats(), from); }
  static HWY_INLINE void store(FloatVector value, Lane* to) { hn::StoreU(value, Floats(), to); }
  static HWY_INLINE void store_at_random(FloatVector value, std::uint32_t, Lane* to) { store(value, to); }
};

// As moments, beside gradients with short NaNs.
struct Bfloat16 {
  using Lane = std::uint16_t;
  static HWY_INLINE FloatVector load(const Lane* from) { return widened(load_halves(from)); }
  static HWY_INLINE void store(FloatVector value, Lane* to) {
    store_halves(rounded_result(value, hn::Set(Words(), 0x8000u)), to);
  }
  static HWY_INLINE void store_at_random(FloatVector value, std::uint32_t seed, Lane* to) {
    store_halves(rounded_result(value, random_halves(value, seed)), to);
  }
};

struct Float16 {
  using Lane = std::uint16_t;
  static HWY_INLINE FloatVector load(const Lane* from) { return widened_float16(Words(), load_halves(from)); }
};

// A parameter with its master, as it is loaded and stored.

struct Whole {  // fp32, which has none
  using Lane = float;
  using MasterLane = float;
  static constexpr bool has_master = false;
  static HWY_INLINE FloatVector load(const Lane* parameter, const MasterLane*) { return Float32::load(parameter); }
  static HWY_INLINE void store(FloatVector value, Lane* parameter, MasterLane*) { Float32::store(value, parameter); }
};

struct WithMaster {
  using Lane = std::uint16_t;
  using MasterLane = float;
  static constexpr bool has_master = true;
  static HWY_INLINE FloatVector load(const Lane* parameter, const MasterLane* master) {
    const auto bits = load_halves(parameter);
    const auto value = Float32::load(master);
    const auto unchanged = hn::RebindMask(Floats(), hn::Eq(bits, rounded(value)));
    return hn::IfThenElse(unchanged, value, widened(bits));
  }
  static HWY_INLINE void store(FloatVector value, Lane* parameter, MasterLane* master) {
    store_halves(rounded(value), parameter);
    Float32::store(value, master);
  }
};

struct Split {
  using Lane = std::uint16_t;
  using MasterLane = std::uint16_t;
  static constexpr bool has_master = true;
  static HWY_INLINE FloatVector load(const Lane* parameter, const MasterLane* master) {
    return joined(load_halves(parameter), load_halves(master));
  }
  static HWY_INLINE void store(FloatVector value, Lane* parameter, MasterLane* master) {
    store_halves(rounded(value), parameter);
    store_halves(hn::BitCast(Words(), value), master);
  }
};

// Beside bf16 moments. A NaN of its own that is rounded gives the upper half that it was joined of.
struct SplitBesideShort : Split {
  static HWY_INLINE void store(FloatVector value, Lane* parameter, MasterLane* master) {
    Bfloat16::store(value, parameter);
    store_halves(hn::BitCast(Words(), value), master);
  }
};

// ---- A run

// Room for the last, incomplete vector of an array: it goes through the same vector code as every other element. The
// padding is of small values, which raise no floating point exception.
template <class T>
struct Tail {
  Tail(const T* values, std::size_t count) {
    std::memset(static_cast<void*>(lanes), 0x3c, sizeof lanes);
    if (count != 0) {
      std::memcpy(static_cast<void*>(lanes), values, count * sizeof(T));
    }
  }
  void store(T* values, std::size_t count) const { std::memcpy(static_cast<void*>(values), lanes, count * sizeof(T)); }

  HWY_ALIGN T lanes[kMaxLanes];
};

template <class Parameter, class Gradient, class Moment>
HWY_INLINE void update_lanes(const AdamWStep& step, typename Parameter::Lane* HWY_RESTRICT parameter,
                             const typename Gradient::Lane* HWY_RESTRICT gradient,
                             typename Parameter::MasterLane* HWY_RESTRICT master,
                             typename Moment::Lane* HWY_RESTRICT momentum,
                             typename Moment::Lane* HWY_RESTRICT variance) {
  auto p = Parameter::load(parameter, master);
  auto m = Moment::load(momentum);
  auto v = Moment::load(variance);
  auto g = Gradient::load(gradient);
  if constexpr (std::is_same_v<Moment, Bfloat16> && !std::is_same_v<Gradient, Bfloat16>) {
    g = with_short_nans(g);
  }
  adamw_formula<VectorMath>(step, g, p, m, v);
  Parameter::store(p, parameter, master);
  Moment::store(m, momentum);
  Moment::store_at_random(v, step.seed, variance);
}

// Asks for the line of an array that comes so many elements later. Where all of its elements have 2 bytes, arithmetic
// leaves memory so much time that this pays: a tenth to a quarter, most of it on small pages. Elsewhere it costs.
template <class Lane>
HWY_INLINE void ask_ahead(const Lane* array) {
  constexpr std::size_t elements = 256;
  if constexpr (sizeof(Lane) == 2) {
    hwy::Prefetch(array + elements);
  }
}

template <class Parameter, class Gradient, class Moment>
void update_run(const AdamWStep& coefficients, const AdamWRun& run) {
  using Master = typename Parameter::MasterLane;
  const AdamWStep step = coefficients;  // a copy, which no store below can alias
  auto* const parameter = static_cast<typename Parameter::Lane*>(run.parameter);
  const auto* const gradient = static_cast<const typename Gradient::Lane*>(run.gradient);
  auto* const master = static_cast<Master*>(run.master);
  auto* const momentum = static_cast<typename Moment::Lane*>(run.momentum);
  auto* const variance = static_cast<typename Moment::Lane*>(run.variance);
  const std::size_t lanes = hn::Lanes(Floats());
  std::size_t i = 0;
  const auto update_at = [&](std::size_t at) {
    update_lanes<Parameter, Gradient, Moment>(step, parameter + at, gradient + at,
                                              Parameter::has_master ? master + at : nullptr, momentum + at,
                                              variance + at);
  };
  if constexpr (std::is_same_v<Moment, Bfloat16>) {
    for (; i + 2 * lanes <= run.count; i += 2 * lanes) {  // with the widest vectors, a line
      ask_ahead(parameter + i);
      ask_ahead(gradient + i);
      if constexpr (Parameter::has_master) {
        ask_ahead(master + i);
      }
      ask_ahead(momentum + i);
      ask_ahead(variance + i);
      update_at(i);
      update_at(i + lanes);
    }
  }
  for (; i + lanes <= run.count; i += lanes) {
    update_at(i);
  }
  if (const std::size_t rest = run.count - i; rest != 0) {
    Tail p(parameter + i, rest);
    const Tail g(gradient + i, rest);
    Tail<Master> w(Parameter::has_master ? master + i : nullptr, Parameter::has_master ? rest : 0);
    Tail m(momentum + i, rest);
    Tail v(variance + i, rest);
    update_lanes<Parameter, Gradient, Moment>(step, p.lanes, g.lanes, w.lanes, m.lanes, v.lanes);
    p.store(parameter + i, rest);
    m.store(momentum + i, rest);
    v.store(variance + i, rest);
    if (Parameter::has_master) {
      w.store(master + i, rest);
    }
  }
}

template <class Parameter, class Moment>
void update_by_gradient(const AdamWStep& step, const AdamWRun& run) {
  switch (run.gradient_type) {
    case ElementType::float32:
      return update_run<Parameter, Float32, Moment>(step, run);
    case ElementType::bfloat16:
      return update_run<Parameter, Bfloat16, Moment>(step, run);
    case ElementType::float16:
      return update_run<Parameter, Float16, Moment>(step, run);
  }
}

void update(const AdamWStep& step, const AdamWRun& run) {
  const bool is_whole = run.parameter_type == ElementType::float32;
  switch (run.states) {
    case StateFormat::float32:
      return is_whole ? update_by_gradient<Whole, Float32>(step, run)
                      : update_by_gradient<WithMaster, Float32>(step, run);
    case StateFormat::split:
      return is_whole ? update_by_gradient<Whole, Float32>(step, run) : update_by_gradient<Split, Float32>(step, run);
    case StateFormat::split_bfloat16:
      return is_whole ? update_by_gradient<Whole, Bfloat16>(step, run)
                      : update_by_gradient<SplitBesideShort, Bfloat16>(step, run);
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
      root_bias_correction2(static_cast<float>(std::sqrt(1 - std::pow(options.beta2, static_cast<double>(step))))),
      epsilon(static_cast<float>(options.epsilon)),
      step_size(
          static_cast<float>(-(options.learning_rate / (1 - std::pow(options.beta1, static_cast<double>(step)))))),
      seed(static_cast<std::uint32_t>(step) * 0x9e3779b9u) {
  assert(step >= 1);
}

void adamw_update(const AdamWStep& step, const AdamWRun& run) {
  assert(run.parameter_type != ElementType::float16);
  HWY_DYNAMIC_DISPATCH(update)(step, run);
}

AdamWRun part_of(const AdamWRun& run, std::size_t first, std::size_t count) {
  const auto at = [&](void* array, std::size_t element_bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<std::byte*>(array) + first * element_bytes;
  };
  const std::size_t moment_bytes = bytes_of(moment_type(run.states));
  AdamWRun part = run;
  part.parameter = at(run.parameter, bytes_of(run.parameter_type));
  part.gradient = static_cast<const std::byte*>(run.gradient) + first * bytes_of(run.gradient_type);
  part.master = at(run.master, master_bytes(run.states, run.parameter_type));
  part.momentum = at(run.momentum, moment_bytes);
  part.variance = at(run.variance, moment_bytes);
  part.count = count;
  return part;
}

void adamw_update(const AdamWStep& step, const AdamWRun& run, const UpdateThreads& threads) {
  constexpr std::size_t most = 32768;
  threads.for_each((run.count + most - 1) / most, [&](std::size_t i) {
    adamw_update(step, part_of(run, i * most, std::min(most, run.count - i * most)));
  });
}

const char* adamw_instruction_set() { return HWY_DYNAMIC_DISPATCH(instruction_set)(); }

bool adamw_uses_fma() { return HWY_DYNAMIC_DISPATCH(uses_fma)(); }

}  // namespace terrace
#endif
