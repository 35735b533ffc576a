// How far moments of bf16 take AdamW from exact arithmetic, element by element. That its bits are those of the scalar
// reference, with the same rounding, is in adamw_test.cpp.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "optimizer/adamw.h"
#include "tests/optimizer/random_state.h"

namespace terrace {
namespace {

constexpr int steps = 1000;
/// Elements of their own; those of a longer run are the same again. An element's result depends on that element alone,
/// so each is compared with what it is to be; and of this many no multiple is one of a vector's or of a thread's part.
constexpr std::size_t period = 4099;

/// One element in float64, and how far bf16 moments may be from it: every rounding of theirs has 2^-8 of the value at
/// most (8 bits of significand), and 2^-7 at random, which goes to either neighbour.
class ExactElement {
 public:
  explicit ExactElement(double the_parameter) : parameter(the_parameter) {}

  void update(const AdamWOptions& o, int t, double g) {
    // What is off already decays with the moment. What fp32 rounds off in a sum whose parts cancel comes on top.
    const double of_float = 0x1p-22 * (o.beta1 * std::abs(momentum) + (1 - o.beta1) * std::abs(g));
    momentum = o.beta1 * momentum + (1 - o.beta1) * g;
    momentum_bound = o.beta1 * momentum_bound + 0x1p-8 * (std::abs(momentum) + o.beta1 * momentum_bound) + of_float;
    // Roundings at random are right in the mean, and their variance is a quarter of a last place's square at most: it
    // adds up. In the worst case of all going one way, a beta2 of 0.999 would leave no digit right.
    variance = o.beta2 * variance + (1 - o.beta2) * g * g;
    const double rounding = 0x1p-7 * variance / 2;
    variance_spread = o.beta2 * o.beta2 * variance_spread + rounding * rounding;
    const double denominator = std::sqrt(variance) / std::sqrt(1 - std::pow(o.beta2, t)) + o.epsilon;
    const double change = o.learning_rate / (1 - std::pow(o.beta1, t)) * momentum / denominator;
    parameter = parameter * (1 - o.learning_rate * o.weight_decay) - change;
    way += std::abs(change);
    rounded_off += 0x1p-23 * (std::abs(parameter) + std::abs(change));
  }
  /// Four times the standard deviation.
  double variance_bound() const { return 4 * std::sqrt(variance_spread); }
  /// Of the way that its changes have gone, forth and back. Errors of the moments change sign all the time. Were all of
  /// them alike and as large as the bounds, it would be twice as much.
  double parameter_bound() const { return way / 16 + rounded_off; }

  double parameter, momentum = 0, variance = 0;
  double momentum_bound = 0, variance_spread = 0;
  double way = 0, rounded_off = 0;  // and what an fp32 parameter loses by its own roundings at most
};

float widened(float value) { return value; }
float widened(std::uint16_t bits) { return bfloat16_to_float(bits); }

template <class State>
double master_of(const State& state, std::size_t i) {
  if constexpr (State::has_master) {
    return joined(state.parameter[i], state.master[i]);
  } else {
    return state.parameter[i];
  }
}

/// Fills an array with the elements, over and over.
template <class T>
void repeat(const std::vector<T>& elements, std::vector<T>& all) {
  for (std::size_t i = 0; i < all.size(); i += elements.size()) {
    std::copy_n(elements.begin(), std::min(elements.size(), all.size() - i),
                all.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

template <class State>
void expect_within_bounds_of_float64(const std::string& format, std::size_t count, double beta2) {
  AdamWOptions options = kOptions;
  options.beta2 = beta2;
  const std::size_t distinct = std::min(count, period);
  State state(count, 3);
  repeat(State(distinct, 3).parameter, state.parameter);
  std::vector<ExactElement> exact;
  for (std::size_t i = 0; i < distinct; ++i) exact.emplace_back(widened(state.parameter[i]));
  typename State::Gradient gradient(count);
  const UpdateThreads threads(2);
  double momentum = 0, variance = 0, parameter = 0;  // the worst of what is allowed
  for (int t = 1; t <= steps; ++t) {
    repeat(State::gradient(distinct, static_cast<std::uint32_t>(t)), gradient);
    adamw_update(AdamWStep(options, t), state.run(gradient), threads);
    for (std::size_t i = 0; i < distinct; ++i) exact[i].update(options, t, widened(gradient[i]));
    if (t != 1 && t != 2 && t != 10 && t != 100 && t != steps) continue;
    for (std::size_t i = 0; i < count; ++i) {
      const ExactElement& element = exact[i % distinct];
      const double momentum_error = std::abs(widened(state.momentum[i]) - element.momentum);
      const double variance_error = std::abs(widened(state.variance[i]) - element.variance);
      const double parameter_error = std::abs(master_of(state, i) - element.parameter);
      ASSERT_LE(momentum_error, element.momentum_bound) << "of " << element.momentum << ", " << i << ", step " << t;
      ASSERT_LE(variance_error, element.variance_bound()) << "of " << element.variance << ", " << i << ", step " << t;
      ASSERT_LE(parameter_error, element.parameter_bound())
          << "of " << element.parameter << ", " << i << ", step " << t;
      if (element.momentum_bound > 0) momentum = std::max(momentum, momentum_error / element.momentum_bound);
      if (element.variance_spread > 0) variance = std::max(variance, variance_error / element.variance_bound());
      parameter = std::max(parameter, parameter_error / element.parameter_bound());
    }
  }
  testing::Test::RecordProperty("momentum of " + format + ", of its bound", std::to_string(momentum));
  testing::Test::RecordProperty("variance of " + format + ", of its bound", std::to_string(variance));
  testing::Test::RecordProperty("parameter of " + format + ", of its bound", std::to_string(parameter));
}

class AdamWShortMoments : public testing::TestWithParam<std::tuple<std::size_t, double>> {};

TEST_P(AdamWShortMoments, are_as_close_to_float64_as_their_roundings_let_them_and_parameters_to_a_16th_of_their_way) {
  const auto [count, beta2] = GetParam();
  using WholeShort = AdamWState<ElementType::float32, ElementType::float32, StateFormat::split_bfloat16>;
  expect_within_bounds_of_float64<WholeShort>("fp32", count, beta2);
  expect_within_bounds_of_float64<SplitBfloat16State>("split", count, beta2);
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdamWShortMoments,
                         testing::Combine(testing::Values(1, 22, 63, 64, 128, 1'000, 1'024, 1'048'576),
                                          testing::Values(0.95, 0.999)));

}  // namespace
}  // namespace terrace
