#include "optimizer/sgd.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/optimizer/adamw_reference.h"
#include "tests/optimizer/instruction_sets.h"
#include "tests/optimizer/random_state.h"

namespace terrace {

namespace reference {
#include "optimizer/sgd_formula.inc"
}  // namespace reference

namespace {

constexpr SgdOptions plain{.learning_rate = 1e-2, .momentum = 0, .dampening = 0, .weight_decay = 0, .nesterov = false};
constexpr SgdOptions with_momentum{
    .learning_rate = 1e-2, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.01, .nesterov = false};
constexpr SgdOptions nesterov{
    .learning_rate = 1e-2, .momentum = 0.9, .dampening = 0, .weight_decay = 0.01, .nesterov = true};

/// As the kernels have it, without a variance.
template <class State>
UpdateRun run_of(State& state, const typename State::Gradient& gradient) {
  UpdateRun run = state.run(gradient);
  run.variance = nullptr;
  return run;
}

template <class State>
void update_by_reference(State& state, const SgdStep& step, const typename State::Gradient& gradient) {
  typename State::MasterLane none{};
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    auto& master = State::has_master ? state.master[i] : none;
    float p = reference::master_of(state.parameter[i], master);
    float m = reference::widened(state.momentum[i], ElementType::bfloat16);
    const float g = reference::widened(gradient[i], State::gradients);
    const float change = reference::update_sgd_momentum<reference::ScalarMath>(step, g, p, m);
    reference::update_by_sgd<reference::ScalarMath>(step, change, p);
    reference::store_master(p, state.parameter[i], master);
    if constexpr (std::is_same_v<typename State::MomentLane, float>) {
      state.momentum[i] = m;
    } else {
      state.momentum[i] = float_to_bfloat16(m);
    }
  }
}

template <class State>
class Sgd : public testing::Test {};

using States = testing::Types<FloatState, Bfloat16State, SplitState, SplitBfloat16State,
                              AdamWState<ElementType::float32, ElementType::float32, StateFormat::split_bfloat16>,
                              AdamWState<ElementType::bfloat16, ElementType::float32, StateFormat::split_bfloat16>,
                              AdamWState<ElementType::float32, ElementType::float16, StateFormat::float32>>;
TYPED_TEST_SUITE(Sgd, States);

TYPED_TEST(Sgd, is_its_definition_bit_for_bit_at_any_size_and_instruction_set) {
  with_each_instruction_set([] {
    if (!adamw_uses_fma()) return;
    for (const std::size_t count : {1, 7, 22, 64, 1000}) {
      for (const SgdOptions& options : {plain, with_momentum, nesterov}) {
        TypeParam state(count, 1);
        TypeParam expected(count, 1);
        for (int t = 1; t <= 4; ++t) {
          const auto gradient = TypeParam::gradient(count, static_cast<std::uint32_t>(t));
          const SgdStep step(options, t, t == 2 ? 0.5f : 1.0f);
          sgd_update(step, run_of(state, gradient));
          update_by_reference(expected, step, gradient);
        }
        EXPECT_EQ(state, expected) << count;
      }
    }
  });
}

TYPED_TEST(Sgd, does_not_depend_on_where_a_run_is_cut) {
  TypeParam whole(1000, 1);
  TypeParam cut(1000, 1);
  const auto gradient = TypeParam::gradient(1000, 2);
  const SgdStep step(nesterov, 1);
  sgd_update(step, run_of(whole, gradient));
  for (std::size_t from = 0; from < 1000; from += 125) {
    sgd_update(step, part_of(run_of(cut, gradient), from, 125));
  }
  EXPECT_EQ(whole, cut);
}

TEST(SgdStep, takes_the_whole_gradient_into_the_momentum_at_the_first_step) {
  EXPECT_EQ(SgdStep(with_momentum, 1).new_part, 1.0f);
  EXPECT_EQ(SgdStep(with_momentum, 2).new_part, 0.9f);
}

TEST(SgdStep, goes_up_the_gradient_to_maximize) {
  SgdOptions up = plain;
  up.maximize = true;
  EXPECT_EQ(SgdStep(up, 1, 0.5f).gradient_scale, -0.5f);
}

TEST(SgdUpdate, leaves_a_parameter_alone_at_a_rate_of_zero_and_still_learns_momentum) {
  SgdOptions still = with_momentum;
  still.learning_rate = 0;
  FloatState state(40, 1);
  const FloatState before = state;
  const auto gradient = FloatState::gradient(40, 1);
  sgd_update(SgdStep(still, 1), run_of(state, gradient));
  EXPECT_EQ(state.parameter, before.parameter);
  EXPECT_NE(state.momentum, before.momentum);
}

TEST(SgdUpdate, keeps_a_parameters_nan_a_nan_in_momentum_of_two_bytes) {
  using State = AdamWState<ElementType::float32, ElementType::float32, StateFormat::split_bfloat16>;
  State state(20, 1);
  const std::uint32_t payload = 0x7fffffffu;
  std::memcpy(&state.parameter[3], &payload, sizeof payload);
  sgd_update(SgdStep(with_momentum, 1), run_of(state, State::gradient(20, 1)));
  EXPECT_TRUE(std::isnan(bfloat16_to_float(state.momentum[3])));
  EXPECT_TRUE(std::isnan(state.parameter[3]));
}

TEST(SgdUpdate, refuses_a_run_that_lacks_something_and_a_step_below_one) {
  FloatState state(40, 1);
  const FloatState before = state;
  const auto gradient = FloatState::gradient(40, 1);
  UpdateRun run = run_of(state, gradient);
  run.momentum = nullptr;
  EXPECT_THROW(sgd_update(SgdStep(with_momentum, 1), run), LogicError);
  run = run_of(state, gradient);
  run.parameter_type = ElementType::float16;
  EXPECT_THROW(sgd_update(SgdStep(with_momentum, 1), run), LogicError);
  EXPECT_EQ(state, before);
  EXPECT_THROW((SgdStep{with_momentum, 0}), LogicError);
}

}  // namespace
}  // namespace terrace
