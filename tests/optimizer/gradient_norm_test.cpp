#include "optimizer/gradient_norm.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/optimizer/instruction_sets.h"
#include "tests/optimizer/random_state.h"

namespace terrace {
namespace {

template <class T>
double sum_of(const std::vector<T>& gradient) {
  SquaredNorm norm;
  norm.add(gradient.data(), gradient.size());
  return norm.sum();
}

template <class T>
double sum_in_pieces(const std::vector<T>& gradient, std::mt19937& random, std::size_t longest) {
  SquaredNorm norm;
  for (std::size_t from = 0; from < gradient.size();) {
    const std::size_t count = std::min<std::size_t>(gradient.size() - from, random() % (longest + 1));
    norm.add(gradient.data() + from, count);
    from += count;
  }
  return norm.sum();
}

// The order of additions that the header states, element by element.
double sum_by_definition(const std::vector<float>& gradient) {
  double sum = 0;
  for (std::size_t block = 0; block < gradient.size(); block += 4096) {
    std::array<double, 16> lane{};
    for (std::size_t i = block; i < std::min(gradient.size(), block + 4096); ++i) {
      lane[i % 16] += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    }
    for (const std::size_t half : {8u, 4u, 2u, 1u}) {
      for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    sum += lane[0];
  }
  return sum;
}

TEST(SquaredNorm, gives_the_bits_of_its_definition_on_every_instruction_set) {
  with_each_instruction_set([] {
    for (const std::size_t count : {0, 1, 15, 16, 17, 100, 4095, 4096, 4097, 8192, 50000}) {
      const auto gradient = random_gradient(count, 1);
      EXPECT_EQ(sum_of(gradient), sum_by_definition(gradient)) << count;
    }
  });
}

TEST(SquaredNorm, does_not_depend_on_cuts) {
  with_each_instruction_set([] {
    const auto gradient = random_gradient(30011, 2);
    const auto gradient_bf16 = to_bfloat16(gradient);
    const double sum = sum_of(gradient), sum_bf16 = sum_of(gradient_bf16);
    std::mt19937 random(3);
    for (const std::size_t longest : {1, 5, 16, 100, 4096, 5000, 20000}) {
      for (int round = 0; round < 5; ++round) {
        ASSERT_EQ(sum_in_pieces(gradient, random, longest), sum) << longest;
        ASSERT_EQ(sum_in_pieces(gradient_bf16, random, longest), sum_bf16) << longest;
      }
    }
  });
}

TEST(SquaredNorm, of_bf16_is_that_of_the_widened_values) {
  const auto bits = to_bfloat16(random_gradient(10000, 4));
  std::vector<float> widened;
  for (const std::uint16_t g : bits) widened.push_back(bfloat16_to_float(g));
  EXPECT_EQ(sum_of(bits), sum_of(widened));
}

TEST(SquaredNorm, may_be_read_between_pieces) {
  const auto gradient = random_gradient(5000, 5);
  SquaredNorm norm;
  norm.add(gradient.data(), 1234);
  EXPECT_EQ(norm.sum(), sum_by_definition({gradient.begin(), gradient.begin() + 1234}));
  norm.add(gradient.data() + 1234, 5000 - 1234);
  EXPECT_EQ(norm.sum(), sum_of(gradient));
}

TEST(SquaredNorm, neither_overflows_nor_loses_the_smallest) {
  constexpr float kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(sum_of(std::vector<float>(16, kLargest)), 16 * static_cast<double>(kLargest) * kLargest);
  EXPECT_EQ(sum_of(std::vector<float>(16, kSmallest)), 16 * static_cast<double>(kSmallest) * kSmallest);
}

TEST(SquaredNorm, shows_nan_and_infinity_wherever_they_are) {
  for (const std::size_t at : {0u, 20u, 4096u, 4999u}) {
    auto gradient = random_gradient(5000, 6);
    gradient[at] = -std::numeric_limits<float>::infinity();
    EXPECT_TRUE(std::isinf(sum_of(gradient)));
    gradient[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(sum_of(gradient)));
  }
}

TEST(ClipCoefficient, scales_down_to_the_limit_and_never_up) {
  EXPECT_EQ(clip_coefficient(0.5, 1.0), 1.0f);
  EXPECT_EQ(clip_coefficient(0.0, 1.0), 1.0f);
  EXPECT_EQ(clip_coefficient(4.0, 1.0), static_cast<float>(1.0 / (4.0 + 1e-6)));
}

TEST(ClipCoefficient, is_zero_for_an_infinite_norm_and_nan_for_nan) {
  EXPECT_EQ(clip_coefficient(std::numeric_limits<double>::infinity(), 1.0), 0.0f);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::numeric_limits<double>::quiet_NaN(), 1.0)));
}

TEST(CombinedNorm, is_the_root_of_the_sum_in_order) {
  EXPECT_EQ(combined_norm({}), 0.0);
  EXPECT_EQ(combined_norm(std::array{9.0, 16.0}), 5.0);
}

}  // namespace
}  // namespace terrace
