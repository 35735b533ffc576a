// bf16 parameters, with a master or with the half of one that they lack, and bf16 moments.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "optimizer/adamw.h"
#include "tests/optimizer/instruction_sets.h"
#include "tests/optimizer/random_state.h"

namespace terrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(AdamWBfloat16, starts_a_master_of_zeros_from_the_parameter) {
  with_each_instruction_set([] {
    Bfloat16State state(100, 8);
    FloatState wide(100, 8);
    for (std::size_t i = 0; i < 100; ++i) wide.parameter[i] = bfloat16_to_float(state.parameter[i]);
    const auto gradient = random_gradient(100, 1);
    const auto gradient_bf16 = to_bfloat16(gradient);
    std::vector<float> widened;
    for (const std::uint16_t g : gradient_bf16) widened.push_back(bfloat16_to_float(g));
    state.update(AdamWStep(kOptions, 1), gradient_bf16, 0, 100);
    wide.update(AdamWStep(kOptions, 1), widened, 0, 100);
    EXPECT_EQ(state.master, wide.parameter);
    EXPECT_EQ(state.momentum, wide.momentum);
    EXPECT_EQ(state.parameter, to_bfloat16(wide.parameter));
  });
}

TEST(AdamWBfloat16, gathers_changes_too_small_for_the_parameter_in_the_master) {
  AdamWOptions options = kOptions;
  options.learning_rate = 1e-5;
  options.weight_decay = 0;
  const std::uint16_t one = float_to_bfloat16(1);
  Bfloat16State state(1, 1);
  state.parameter = {one};
  state.update(AdamWStep(options, 1), {one});
  EXPECT_EQ(state.parameter[0], one);
  for (int t = 2; t <= 400; ++t) {
    state.update(AdamWStep(options, t), {one});
  }
  EXPECT_NEAR(state.master[0], 1 - 400e-5, 1e-4);
  EXPECT_LT(bfloat16_to_float(state.parameter[0]), 1);
}

TEST(AdamWBfloat16, honours_a_parameter_that_was_written_in_place) {
  with_each_instruction_set([] {
    Bfloat16State state(40, 9);
    state.update(AdamWStep(kOptions, 1), Bfloat16State::gradient(40, 1), 0, 40);
    const Bfloat16State untouched = state;
    state.parameter[3] = float_to_bfloat16(0.5f);
    state.parameter[33] = 0x8000;  // minus zero
    state.update(AdamWStep(kOptions, 2), Bfloat16State::gradient(40, 2), 0, 40);
    EXPECT_NEAR(state.master[3], 0.5f, 0.01f);
    EXPECT_NEAR(state.master[33], 0, 0.01f);
    Bfloat16State others = untouched;
    others.update(AdamWStep(kOptions, 2), Bfloat16State::gradient(40, 2), 0, 40);
    for (std::size_t i = 0; i < 40; ++i) {
      if (i == 3 || i == 33) continue;
      EXPECT_EQ(state.master[i], others.master[i]) << i;
    }
  });
}

TEST(AdamWBfloat16, keeps_a_nan_a_nan_and_infinity_infinite) {
  with_each_instruction_set([] {
    // Payloads that would carry into another number if they were rounded.
    for (const std::uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7fff8000u, 0x7f808000u, 0x7fc00000u}) {
      Bfloat16State state(20, 10);
      state.master[17] = std::bit_cast<float>(bits);
      state.parameter[17] = float_to_bfloat16(state.master[17]);
      state.update(AdamWStep(kOptions, 1), Bfloat16State::gradient(20, 1), 0, 20);
      EXPECT_TRUE(std::isnan(state.master[17]));
      EXPECT_TRUE(std::isnan(bfloat16_to_float(state.parameter[17]))) << std::hex << bits;
      // The same payload in a moment: it reaches the master after that was checked against the parameter.
      Bfloat16State moment(20, 10);
      moment.momentum[17] = std::bit_cast<float>(bits);
      moment.update(AdamWStep(kOptions, 1), Bfloat16State::gradient(20, 1), 0, 20);
      EXPECT_TRUE(std::isnan(moment.master[17]));
      EXPECT_TRUE(std::isnan(bfloat16_to_float(moment.parameter[17]))) << std::hex << bits;
    }
    for (const float infinity : {kInfinity, -kInfinity}) {
      Bfloat16State state(20, 10);
      state.parameter[17] = float_to_bfloat16(infinity);
      state.update(AdamWStep(kOptions, 1), Bfloat16State::gradient(20, 1), 0, 20);
      EXPECT_EQ(state.master[17], infinity);
      EXPECT_EQ(bfloat16_to_float(state.parameter[17]), infinity);
    }
  });
}

TEST(AdamWBfloat16, rounds_every_upper_half_as_the_scalar_rule_does) {
  AdamWOptions options = kOptions;  // an update that changes nothing, so that the master is what is rounded
  options.learning_rate = 0;
  options.weight_decay = 0;
  const AdamWStep step(options, 1);
  const std::size_t count = 65536;
  const std::vector<std::uint16_t> gradient(count, 0);
  with_each_instruction_set([&] {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      Bfloat16State state(count, 1);
      auto& [parameter, master, momentum, variance] = state;
      for (std::uint32_t upper = 0; upper < count; ++upper) {
        // Through memory: a signalling NaN need not survive being passed as a float.
        const std::uint32_t bits = upper << 16 | lower;
        std::memcpy(&master[upper], &bits, sizeof bits);
        parameter[upper] = float_to_bfloat16(master[upper]);
      }
      const std::vector<std::uint16_t> expected = parameter;
      state.update(step, gradient);
      for (std::size_t i = 0; i < count; ++i) {
        if ((expected[i] & 0x7fffu) > 0x7f80u) {
          ASSERT_TRUE(std::isnan(bfloat16_to_float(parameter[i]))) << std::hex << i << " " << lower;
        } else {
          // Had the kernel rounded differently, it would have started the master again from the parameter.
          const std::uint32_t kept = static_cast<std::uint32_t>(i) << 16 | lower;
          ASSERT_EQ(std::bit_cast<std::uint32_t>(master[i]), kept) << std::hex << i << " " << lower;
          ASSERT_EQ(parameter[i], expected[i]) << std::hex << i << " " << lower;
        }
      }
    }
  });
}

class AdamWSplitOfSize : public testing::TestWithParam<std::size_t> {};

TEST_P(AdamWSplitOfSize, trains_bit_for_bit_as_a_whole_master_does) {
  const std::size_t count = GetParam();
  std::vector<SplitState::Gradient> gradients;
  for (std::uint32_t seed = 1; seed <= 7; ++seed) gradients.push_back(SplitState::gradient(count, seed));
  const auto train = [&] {
    Bfloat16State whole(count, 3);
    SplitState split(count, 3);
    for (int t = 1; t <= 1000; ++t) {
      const auto& gradient = gradients[static_cast<std::size_t>(t) % gradients.size()];
      whole.update(AdamWStep(kOptions, t, clip_of(t)), gradient);
      split.update(AdamWStep(kOptions, t, clip_of(t)), gradient);
    }
    EXPECT_EQ(split.parameter, whole.parameter);
    EXPECT_EQ(split.momentum, whole.momentum);
    EXPECT_EQ(split.variance, whole.variance);
    for (std::size_t i = 0; i < split.master.size(); ++i) {
      ASSERT_EQ(joined(split.parameter[i], split.master[i]), whole.master[i]) << i;
    }
  };
  if (count < 10'000) {
    with_each_instruction_set(train);
  } else {  // each would take long
    train();
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdamWSplitOfSize, testing::Values(1, 22, 63, 64, 128, 1'000, 1'024, 4'099, 1'048'576));

TEST(AdamWSplit, keeps_a_written_parameter_to_half_a_unit_and_no_number_becomes_another) {
  AdamWOptions still = kOptions;  // an update that changes nothing
  still.learning_rate = 0;
  still.weight_decay = 0;
  with_each_instruction_set([&] {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      SplitState state(65536, 1);
      for (std::uint32_t upper = 0; upper < 65536; ++upper) {
        state.parameter[upper] = static_cast<std::uint16_t>(upper);
        state.master[upper] = static_cast<std::uint16_t>(lower);
      }
      state.update(AdamWStep(still, 1), std::vector<std::uint16_t>(65536, 0));
      for (std::uint32_t upper = 0; upper < 65536; ++upper) {
        if ((upper & 0x7fffu) > 0x7f80u) {
          ASSERT_TRUE(std::isnan(bfloat16_to_float(state.parameter[upper]))) << std::hex << upper << " " << lower;
        } else {
          ASSERT_EQ(state.parameter[upper], upper) << std::hex << upper << " " << lower;
        }
      }
    }
  });
}

TEST(AdamWSplitBfloat16, follows_a_variance_that_changes_by_less_than_its_last_place_in_a_step) {
  AdamWOptions options = kOptions;
  options.beta2 = 0.999;
  for (const float target : {0.0f, 2.0f}) {  // of gradients: the variance is to fall, and to rise
    constexpr std::size_t count = 128;
    SplitBfloat16State state(count, 1);
    FloatState expected(count, 1);
    for (std::size_t i = 0; i < count; ++i) {
      expected.variance[i] = 1 + static_cast<float>(i) / count;
      state.variance[i] = float_to_bfloat16(expected.variance[i]);
    }
    for (int t = 1; t <= 500; ++t) {
      state.update(AdamWStep(options, t), std::vector<std::uint16_t>(count, float_to_bfloat16(target)));
      expected.update(AdamWStep(options, t), std::vector<float>(count, target));
    }
    double mean = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float ratio = bfloat16_to_float(state.variance[i]) / expected.variance[i];
      EXPECT_NEAR(ratio, 1, 0.2) << target;
      mean += ratio / count;
    }
    EXPECT_NEAR(mean, 1, 0.02) << target;
  }
}

}  // namespace
}  // namespace terrace
