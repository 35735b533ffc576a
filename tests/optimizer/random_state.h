/// Options, and seeded parameters, gradients and states, for the tests of the update, in all of its formats.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "optimizer/adamw.h"
#include "optimizer/bfloat16.h"
#include "tests/optimizer/adamw_reference.h"

namespace terrace {

inline constexpr AdamWOptions kOptions{
    .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};

/// Every third step has its gradients clipped.
inline float clip_of(int step) { return step % 3 == 0 ? 0.37f : 1.0f; }

/// Gradients of magnitudes from 1e-12 to 1e3, some of them zero: updates far below and far above a parameter.
inline std::vector<float> random_gradient(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-12, 3);
  std::vector<float> gradient(count);
  for (float& g : gradient) g = random() % 50 == 0 ? 0.0f : normal(random) * std::pow(10.0f, exponent(random));
  return gradient;
}

inline std::vector<std::uint16_t> to_bfloat16(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(float_to_bfloat16(value));
  return bits;
}

inline std::vector<float> random_parameter(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> parameter(count);
  for (float& p : parameter) p = normal(random);
  return parameter;
}

/// Finite ones and subnormal ones of fp16, as bits.
inline std::vector<std::uint16_t> random_float16(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> bits(count);
  for (std::uint16_t& each : bits) {
    each = static_cast<std::uint16_t>((random() % 0x4000u) | (random() % 2 << 15));  // magnitudes below 2
  }
  return bits;
}

/// Parameters and what an optimizer keeps of them.
template <ElementType parameter_type, ElementType gradient_type, StateFormat states>
struct AdamWState {
  static constexpr bool has_master = parameter_type != ElementType::float32;
  static constexpr ElementType gradients = gradient_type;
  using Lane = std::conditional_t<has_master, std::uint16_t, float>;
  using MasterLane = std::conditional_t<has_master && states != StateFormat::float32, std::uint16_t, float>;
  using MomentLane = std::conditional_t<states == StateFormat::split_bfloat16, std::uint16_t, float>;
  using Gradient = std::vector<std::conditional_t<gradient_type == ElementType::float32, float, std::uint16_t>>;

  AdamWState(std::size_t count, std::uint32_t seed) : master(has_master ? count : 0), momentum(count), variance(count) {
    if constexpr (has_master) {
      parameter = to_bfloat16(random_parameter(count, seed));
    } else {
      parameter = random_parameter(count, seed);
    }
  }

  static Gradient gradient(std::size_t count, std::uint32_t seed) {
    if constexpr (gradient_type == ElementType::float32) {
      return random_gradient(count, seed);
    } else {
      return gradient_type == ElementType::float16 ? random_float16(count, seed)
                                                   : to_bfloat16(random_gradient(count, seed));
    }
  }

  UpdateRun run(const Gradient& g) {
    return {.parameter_type = parameter_type,
            .gradient_type = gradient_type,
            .states = states,
            .parameter = parameter.data(),
            .gradient = g.data(),
            .master = has_master ? master.data() : nullptr,
            .momentum = momentum.data(),
            .variance = variance.data(),
            .count = parameter.size()};
  }
  void update(const AdamWStep& step, const Gradient& g, std::size_t from, std::size_t to) {
    adamw_update(step, part_of(run(g), from, to - from));
  }
  void update(const AdamWStep& step, const Gradient& g) { adamw_update(step, run(g)); }
  void update_by_reference(const AdamWStep& step, const Gradient& g) {
    MasterLane none{};
    for (std::size_t i = 0; i < g.size(); ++i) {
      reference::adamw(step, parameter[i], g[i], gradient_type, has_master ? master[i] : none, momentum[i],
                       variance[i]);
    }
  }
  bool operator==(const AdamWState&) const = default;

  std::vector<Lane> parameter;
  std::vector<MasterLane> master;  ///< none where the parameter is fp32
  std::vector<MomentLane> momentum, variance;
};

using FloatState = AdamWState<ElementType::float32, ElementType::float32, StateFormat::float32>;
using Bfloat16State = AdamWState<ElementType::bfloat16, ElementType::bfloat16, StateFormat::float32>;
using SplitState = AdamWState<ElementType::bfloat16, ElementType::bfloat16, StateFormat::split>;
using SplitBfloat16State = AdamWState<ElementType::bfloat16, ElementType::bfloat16, StateFormat::split_bfloat16>;

}  // namespace terrace
