#include "optimizer/adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <type_traits>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/optimizer/instruction_sets.h"
#include "tests/optimizer/many_threads.h"
#include "tests/optimizer/random_state.h"

namespace terrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class State>
class AdamW : public testing::Test {};
template <ElementType gradient>
using Whole = AdamWState<ElementType::float32, gradient, StateFormat::float32>;
template <ElementType gradient>
using WithMaster = AdamWState<ElementType::bfloat16, gradient, StateFormat::float32>;
template <ElementType gradient>
using Split = AdamWState<ElementType::bfloat16, gradient, StateFormat::split>;
template <ElementType gradient>
using SplitShort = AdamWState<ElementType::bfloat16, gradient, StateFormat::split_bfloat16>;
template <ElementType gradient>
using WholeShort = AdamWState<ElementType::float32, gradient, StateFormat::split_bfloat16>;
using States =
    testing::Types<FloatState, Bfloat16State, SplitState, SplitBfloat16State, Whole<ElementType::bfloat16>,
                   Whole<ElementType::float16>, WithMaster<ElementType::float32>, WithMaster<ElementType::float16>,
                   Split<ElementType::float32>, Split<ElementType::float16>, SplitShort<ElementType::float32>,
                   SplitShort<ElementType::float16>, WholeShort<ElementType::float32>,
                   WholeShort<ElementType::bfloat16>, WholeShort<ElementType::float16>,
                   AdamWState<ElementType::float32, ElementType::float32, StateFormat::split>>;
TYPED_TEST_SUITE(AdamW, States);

// Signed zeros compare equal below, and no NaN occurs; a difference in any other bit shows.
TYPED_TEST(AdamW, gives_the_bits_of_the_scalar_reference_on_every_instruction_set_with_fma) {
  int with_fma = 0;
  with_each_instruction_set([&] {
    if (!adamw_uses_fma()) return;
    ++with_fma;
    for (const std::size_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 22, 31, 33, 63, 64, 65, 1000, 4099}) {
      TypeParam state(count, 1), expected(count, 1);
      for (int t = 1; t <= 12; ++t) {
        const AdamWStep step(kOptions, t, clip_of(t));
        const auto gradient = TypeParam::gradient(count, static_cast<std::uint32_t>(t));
        state.update(step, gradient, 0, count);
        expected.update_by_reference(step, gradient);
        ASSERT_EQ(state, expected) << "count " << count << ", step " << t;
      }
    }
  });
  if (with_fma == 0) GTEST_SKIP() << "no instruction set with fused multiply-add here";
}

TYPED_TEST(AdamW, gives_the_same_bits_wherever_a_run_is_cut) {
  with_each_instruction_set([] {
    const std::size_t count = 777;
    TypeParam whole(count, 2), cut(count, 2);
    std::mt19937 random(3);
    for (int t = 1; t <= 30; ++t) {
      const AdamWStep step(kOptions, t, clip_of(t));
      const auto gradient = TypeParam::gradient(count, static_cast<std::uint32_t>(t));
      whole.update(step, gradient, 0, count);
      for (std::size_t from = 0; from < count;) {
        const std::size_t to = std::min<std::size_t>(count, from + 1 + random() % (t % 2 == 0 ? 40 : 200));
        cut.update(step, gradient, from, to);
        from = to;
      }
      ASSERT_EQ(cut, whole) << "step " << t;
    }
  });
}

TYPED_TEST(AdamW, touches_nothing_beyond_the_run) {
  with_each_instruction_set([] {
    const std::size_t count = 100;
    const AdamWStep step(kOptions, 1);
    const auto gradient = TypeParam::gradient(count, 1);
    for (std::size_t length = 0; length <= 40; ++length) {
      TypeParam all(count, 4), state(count, 4);
      const TypeParam before = state;
      all.update(step, gradient, 0, count);
      state.update(step, gradient, 20, 20 + length);
      for (std::size_t i = 0; i < count; ++i) {
        const TypeParam& expected = i >= 20 && i < 20 + length ? all : before;
        ASSERT_EQ(state.parameter[i], expected.parameter[i]) << i << " of length " << length;
        if constexpr (TypeParam::has_master) {
          ASSERT_EQ(state.master[i], expected.master[i]) << i << " of length " << length;
        }
        ASSERT_EQ(state.momentum[i], expected.momentum[i]) << i << " of length " << length;
        ASSERT_EQ(state.variance[i], expected.variance[i]) << i << " of length " << length;
      }
    }
  });
}

TYPED_TEST(AdamW, leaves_parameters_with_rate_and_decay_zero_but_moves_moments) {
  AdamWOptions options = kOptions;
  options.learning_rate = 0;
  options.weight_decay = 0;
  TypeParam state(1000, 5);
  const TypeParam before = state;
  state.update(AdamWStep(options, 1), TypeParam::gradient(1000, 1), 0, 1000);
  EXPECT_EQ(state.parameter, before.parameter);
  EXPECT_NE(state.momentum, before.momentum);
  EXPECT_NE(state.variance, before.variance);
}

TYPED_TEST(AdamW, gives_the_same_bits_on_any_number_of_threads) {
  const ManyThreads many;
  const std::size_t count = many_threads * update_part_elements + 3;
  const AdamWStep step(kOptions, 3);
  const TypeParam before(count, 2);
  const auto gradient = TypeParam::gradient(count, 1);
  TypeParam expected = before;
  expected.update(step, gradient);
  for (const int threads : {1, 2, 3, many_threads}) {
    TypeParam state = before;
    adamw_update(step, state.run(gradient), UpdateThreads(threads));
    EXPECT_EQ(state, expected) << threads;
    // All at work, which those that have no core of their own need not be above.
    state = before;
    Meeting meeting(threads);
    for_each_part(state.run(gradient), UpdateThreads(threads), [&](const UpdateRun& part) {
      meeting.come();
      adamw_update(step, part);
    });
    EXPECT_EQ(meeting.size(), threads);
    EXPECT_EQ(state, expected) << threads;
  }
}

TYPED_TEST(AdamW, keeps_a_nan_a_nan_whatever_its_payload) {
  with_each_instruction_set([] {
    for (const std::size_t at : {7U, 25U}) {  // in either vector of two, whatever their width
      for (const std::uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7fff8000u, 0xffc00000u}) {
        auto gradient = TypeParam::gradient(40, 1);
        if constexpr (TypeParam::gradients == ElementType::float32) {
          std::memcpy(&gradient[at], &bits, sizeof bits);
        } else {
          gradient[at] = static_cast<std::uint16_t>(bits >> 16 | 1);  // a NaN of either type of two bytes
        }
        TypeParam state(40, 1);
        state.update(AdamWStep(kOptions, 1), gradient);
        state.update(AdamWStep(kOptions, 2), TypeParam::gradient(40, 2));
        const auto is_nan = [](auto value) { return std::isnan(reference::widened(value, ElementType::bfloat16)); };
        for (std::size_t i = 0; i < 40; ++i) {
          EXPECT_EQ(is_nan(state.parameter[i]), i == at) << std::hex << bits << " " << at;
          EXPECT_EQ(is_nan(state.momentum[i]), i == at) << std::hex << bits << " " << at;
          EXPECT_EQ(is_nan(state.variance[i]), i == at) << std::hex << bits << " " << at;
        }
      }
    }
  });
}

TYPED_TEST(AdamW, keeps_subnormal_numbers_as_the_scalar_reference_does) {
  std::mt19937 random(2);
  const auto subnormal = [&](auto& lane, std::uint32_t sign) {
    const auto bits = static_cast<std::uint32_t>(random());
    if constexpr (std::is_same_v<std::decay_t<decltype(lane)>, float>) {
      lane = std::bit_cast<float>((sign & bits) | 1 | (bits & 0x7fffffu));
    } else {
      lane = static_cast<std::uint16_t>((sign & bits) >> 16 | 1 | (bits & 0x7fu));
    }
  };
  with_each_instruction_set([&] {
    if (!adamw_uses_fma()) return;
    const std::size_t count = 100;
    TypeParam state(count, 1);
    auto gradient = TypeParam::gradient(count, 1);
    for (std::size_t i = 0; i < count; ++i) {
      subnormal(state.parameter[i], 0x80000000u);
      subnormal(gradient[i], 0x80000000u);
      subnormal(state.momentum[i], 0x80000000u);
      subnormal(state.variance[i], 0);
    }
    TypeParam expected = state;
    for (int t = 1; t <= 3; ++t) {
      const AdamWStep step(kOptions, t, clip_of(t));
      state.update(step, gradient, 0, count);
      expected.update_by_reference(step, gradient);
      ASSERT_EQ(state, expected) << "step " << t;
    }
    EXPECT_GT(std::count_if(state.variance.begin(), state.variance.end(), [](auto v) { return v != 0; }), 90);
  });
}

TYPED_TEST(AdamW, refuses_a_run_that_lacks_something_and_changes_nothing) {
  TypeParam state(40, 1);
  const TypeParam before = state;
  const auto gradient = TypeParam::gradient(40, 1);
  const auto refuse = [&](const UpdateRun& run) {
    EXPECT_THROW(adamw_update(AdamWStep(kOptions, 1), run), LogicError);
    EXPECT_THROW(adamw_update(AdamWStep(kOptions, 1), run, UpdateThreads(2)), LogicError);
    EXPECT_EQ(state, before);
  };
  for (void* UpdateRun::*const array : {&UpdateRun::parameter, &UpdateRun::momentum, &UpdateRun::variance}) {
    UpdateRun run = state.run(gradient);
    run.*array = nullptr;
    refuse(run);
  }
  UpdateRun run = state.run(gradient);
  run.gradient = nullptr;
  refuse(run);
  run = state.run(gradient);
  run.parameter_type = ElementType::float16;
  refuse(run);
  if (TypeParam::has_master) {
    run = state.run(gradient);
    run.master = nullptr;
    refuse(run);
  }
}

TYPED_TEST(AdamW, goes_up_the_gradient_to_maximize) {
  AdamWOptions up = kOptions;
  up.maximize = true;
  TypeParam state(1000, 5), expected(1000, 5);
  const auto gradient = TypeParam::gradient(1000, 1);
  auto negated = gradient;
  for (auto& g : negated) {
    if constexpr (std::is_same_v<std::decay_t<decltype(g)>, float>) {
      g = -g;
    } else {
      g = static_cast<std::uint16_t>(g ^ 0x8000u);
    }
  }
  state.update(AdamWStep(up, 1, 0.5f), gradient);
  expected.update(AdamWStep(kOptions, 1, 0.5f), negated);
  EXPECT_EQ(state, expected);
}

TEST(AdamWStep, follows_the_formulas_in_double_and_rounds_once) {
  const AdamWStep step(kOptions, 7, 0.5f);
  EXPECT_EQ(step.gradient_scale, 0.5f);
  EXPECT_EQ(step.decay, static_cast<float>(1 - 1e-3 * 0.1));
  EXPECT_EQ(step.one_minus_beta1, static_cast<float>(1 - 0.9));  // not 1 - float(0.9)
  EXPECT_EQ(step.one_minus_beta2, static_cast<float>(1 - 0.95));
  EXPECT_EQ(step.inverse_root_bias_correction2, static_cast<float>(1 / std::sqrt(1 - std::pow(0.95, 7.0))));
  EXPECT_EQ(step.step_size, static_cast<float>(-1e-3 / (1 - std::pow(0.9, 7.0))));
}

TEST(AdamWStep, counts_from_one) { EXPECT_THROW((AdamWStep{kOptions, 0}), LogicError); }

TEST(AdamWFloat, moves_a_parameter_by_the_learning_rate_in_its_first_step) {
  AdamWOptions options = kOptions;
  options.weight_decay = 0;
  FloatState state(1, 1);
  state.parameter = {1};
  state.update(AdamWStep(options, 1), {0.25f});
  EXPECT_NEAR(state.parameter[0], 1 - 1e-3, 1e-6);
}

TEST(AdamWFloat, needs_no_alignment_beyond_the_element) {
  FloatState aligned(65, 6), shifted(65, 6);
  const auto gradient = random_gradient(65, 1);
  aligned.update(AdamWStep(kOptions, 1), gradient, 0, 65);
  alignas(64) float storage[4][80];
  float* const p = storage[0] + 1;
  float* const g = storage[1] + 2;
  float* const m = storage[2] + 3;
  float* const v = storage[3] + 5;
  std::copy(shifted.parameter.begin(), shifted.parameter.end(), p);
  std::copy(gradient.begin(), gradient.end(), g);
  std::fill(m, m + 65, 0.0f);
  std::fill(v, v + 65, 0.0f);
  adamw_update(AdamWStep(kOptions, 1), {.parameter_type = ElementType::float32,
                                        .gradient_type = ElementType::float32,
                                        .states = StateFormat::float32,
                                        .parameter = p,
                                        .gradient = g,
                                        .master = nullptr,
                                        .momentum = m,
                                        .variance = v,
                                        .count = 65});
  EXPECT_TRUE(std::equal(p, p + 65, aligned.parameter.begin()));
  EXPECT_TRUE(std::equal(m, m + 65, aligned.momentum.begin()));
  EXPECT_TRUE(std::equal(v, v + 65, aligned.variance.begin()));
}

TEST(AdamWFloat, lets_nan_and_infinity_through_and_keeps_them_to_their_element) {
  with_each_instruction_set([] {
    for (const std::size_t at : {0u, 5u, 21u}) {
      for (const float bad : {kNan, kInfinity, -kInfinity}) {
        FloatState state(22, 7), clean(22, 7);
        auto gradient = random_gradient(22, 1);
        clean.update(AdamWStep(kOptions, 1), gradient, 0, 22);
        gradient[at] = bad;
        state.update(AdamWStep(kOptions, 1), gradient, 0, 22);
        EXPECT_TRUE(std::isnan(state.parameter[at]));  // infinity over infinity
        EXPECT_EQ(std::isnan(state.momentum[at]), std::isnan(bad));
        EXPECT_EQ(std::isinf(state.variance[at]), std::isinf(bad));
        state.parameter[at] = clean.parameter[at];
        state.momentum[at] = clean.momentum[at];
        state.variance[at] = clean.variance[at];
        EXPECT_EQ(state, clean);
      }
    }
  });
}

TEST(AdamWDispatch, names_an_instruction_set_of_its_own_for_each) {
  std::set<std::string> names;
  std::size_t count = 0;
  with_each_instruction_set([&] {
    names.insert(adamw_instruction_set());
    ++count;
  });
  EXPECT_EQ(names.size(), count);
}

}  // namespace
}  // namespace terrace
