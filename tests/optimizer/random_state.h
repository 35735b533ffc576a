/// Seeded parameters, gradients and states for the tests of the update, in fp32 and in bf16 with a master.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "optimizer/adamw.h"
#include "optimizer/bfloat16.h"
#include "tests/optimizer/adamw_reference.h"

namespace terrace {

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

struct FloatState {
  using Gradient = std::vector<float>;

  FloatState(std::size_t count, std::uint32_t seed)
      : parameter(random_parameter(count, seed)), momentum(count), variance(count) {}

  static Gradient gradient(std::size_t count, std::uint32_t seed) { return random_gradient(count, seed); }

  void update(const AdamWStep& step, const Gradient& g, std::size_t from, std::size_t to) {
    adamw_update(step, parameter.data() + from, g.data() + from, momentum.data() + from, variance.data() + from,
                 to - from);
  }
  void update_by_reference(const AdamWStep& step, const Gradient& g) {
    for (std::size_t i = 0; i < g.size(); ++i) reference::adamw(step, parameter[i], g[i], momentum[i], variance[i]);
  }
  bool operator==(const FloatState&) const = default;

  std::vector<float> parameter, momentum, variance;
};

struct Bfloat16State {
  using Gradient = std::vector<std::uint16_t>;

  Bfloat16State(std::size_t count, std::uint32_t seed)
      : parameter(to_bfloat16(random_parameter(count, seed))), master(count), momentum(count), variance(count) {}

  static Gradient gradient(std::size_t count, std::uint32_t seed) { return to_bfloat16(random_gradient(count, seed)); }

  void update(const AdamWStep& step, const Gradient& g, std::size_t from, std::size_t to) {
    adamw_update(step, parameter.data() + from, g.data() + from, master.data() + from, momentum.data() + from,
                 variance.data() + from, to - from);
  }
  void update_by_reference(const AdamWStep& step, const Gradient& g) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      reference::adamw(step, parameter[i], g[i], master[i], momentum[i], variance[i]);
    }
  }
  bool operator==(const Bfloat16State&) const = default;

  std::vector<std::uint16_t> parameter;
  std::vector<float> master, momentum, variance;
};

}  // namespace terrace
