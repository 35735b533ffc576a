#include "optimizer/gradient_norm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "optimizer/float16.h"
#include "tests/optimizer/instruction_sets.h"
#include "tests/optimizer/many_threads.h"
#include "tests/optimizer/random_state.h"

namespace terrace {
namespace {

ElementType type_of(const std::vector<float>&) { return ElementType::float32; }
ElementType type_of(const std::vector<std::uint16_t>&) { return ElementType::bfloat16; }

template <class T>
double sum_of(const std::vector<T>& gradient, int threads = 1) {
  return sum_of_squares(type_of(gradient), gradient.data(), gradient.size(), UpdateThreads(threads));
}

template <class T>
double sum_in_pieces(const std::vector<T>& gradient, std::mt19937& random, std::size_t longest) {
  std::vector<double> blocks;
  for (std::size_t begin = 0; begin < gradient.size(); begin += BlockOfSquares::kElements) {
    const std::size_t end = std::min(gradient.size(), begin + BlockOfSquares::kElements);
    BlockOfSquares block;
    for (std::size_t from = begin; from < end;) {
      const std::size_t count = std::min<std::size_t>(end - from, random() % (longest + 1));
      block.add(type_of(gradient), gradient.data() + from, count);
      from += count;
    }
    blocks.push_back(block.sum());
  }
  EXPECT_EQ(blocks.size(), blocks_of_squares(gradient.size()));
  return sum_of_blocks(blocks);
}

double sum_of_block(const std::vector<float>& gradient, std::size_t index) {
  const std::size_t first = index * BlockOfSquares::kElements;
  BlockOfSquares block;
  block.add(ElementType::float32, gradient.data() + first,
            std::min(BlockOfSquares::kElements, gradient.size() - first));
  return block.sum();
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

TEST(SumOfSquares, gives_the_bits_of_its_definition_on_every_instruction_set) {
  with_each_instruction_set([] {
    for (const std::size_t count : {0, 1, 15, 16, 17, 100, 4095, 4096, 4097, 8192, 50000}) {
      const auto gradient = random_gradient(count, 1);
      EXPECT_EQ(sum_of(gradient), sum_by_definition(gradient)) << count;
    }
  });
}

TEST(SumOfSquares, does_not_depend_on_cuts) {
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

TEST(SumOfSquares, of_bf16_is_that_of_the_widened_values) {
  const auto bits = to_bfloat16(random_gradient(10000, 4));
  std::vector<float> widened;
  for (const std::uint16_t g : bits) widened.push_back(bfloat16_to_float(g));
  EXPECT_EQ(sum_of(bits), sum_of(widened));
}

TEST(SumOfSquares, of_fp16_is_that_of_the_widened_values) {
  with_each_instruction_set([] {
    std::vector<std::uint16_t> bits(65536);  // every value, but for NaN and infinity
    std::vector<float> widened;
    for (std::size_t i = 0; i < bits.size(); ++i) {
      bits[i] = static_cast<std::uint16_t>((i & 0x7c00u) == 0x7c00u ? 0 : i);
      widened.push_back(float16_to_float(bits[i]));
    }
    EXPECT_EQ(sum_of_squares(ElementType::float16, bits.data(), bits.size(), UpdateThreads(1)), sum_of(widened));
    for (const int special : {0x7c00, 0xfc00, 0x7e00}) {
      bits[77] = static_cast<std::uint16_t>(special);
      const double sum = sum_of_squares(ElementType::float16, bits.data(), bits.size(), UpdateThreads(1));
      EXPECT_EQ(std::isnan(sum), special == 0x7e00);
      EXPECT_FALSE(std::isfinite(sum));
    }
  });
}

TEST(Float16, is_widened_as_ieee_754_says) {
  EXPECT_EQ(float16_to_float(0x3c00), 1.0f);
  EXPECT_EQ(float16_to_float(0xc000), -2.0f);
  EXPECT_EQ(float16_to_float(0x7bff), 65504.0f);
  EXPECT_EQ(float16_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(float16_to_float(0x03ff), 1023 * 0x1p-24f);
  EXPECT_EQ(float16_to_float(0x0400), 0x1p-14f);
  EXPECT_TRUE(std::signbit(float16_to_float(0x8000)));
  EXPECT_TRUE(std::isinf(float16_to_float(0x7c00)));
  EXPECT_TRUE(std::isnan(float16_to_float(0x7c01)));
}

TEST(SumOfSquares, does_not_depend_on_the_number_of_threads) {
  const ManyThreads many;
  const auto gradient = random_gradient(300'011, 5);
  const double expected = sum_of(gradient);
  for (const int threads : {2, 3, many_threads}) {
    EXPECT_EQ(sum_of(gradient, threads), expected);
    Meeting meeting(threads);  // so that all are at work
    const auto meet_and_sum = [&](std::size_t, std::size_t block) {
      meeting.come();
      return sum_of_block(gradient, block);
    };
    const std::uint64_t elements = gradient.size();
    EXPECT_EQ(sums_of_squares({&elements, 1}, UpdateThreads(threads), meet_and_sum), std::vector{expected});
    EXPECT_EQ(meeting.size(), threads);
  }
}

TEST(SumOfSquares, of_several_gradients_are_those_of_each_alone) {
  std::vector<std::vector<float>> gradients;
  std::vector<std::uint64_t> elements;
  std::vector<double> alone;
  for (const std::size_t count : {1, 4096, 4097, 0, 40'000, 3, 100'000}) {
    gradients.push_back(random_gradient(count, static_cast<unsigned>(count)));
    elements.push_back(count);
    alone.push_back(sum_of(gradients.back()));
  }
  const auto sum = [&](std::size_t which, std::size_t block) { return sum_of_block(gradients[which], block); };
  EXPECT_EQ(sums_of_squares(elements, UpdateThreads(2), sum), alone);
  EXPECT_TRUE(sums_of_squares({}, UpdateThreads(2), sum).empty());
}

TEST(SumOfSquares, neither_overflows_nor_loses_the_smallest) {
  constexpr float kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(sum_of(std::vector<float>(16, kLargest)), 16 * static_cast<double>(kLargest) * kLargest);
  EXPECT_EQ(sum_of(std::vector<float>(16, kSmallest)), 16 * static_cast<double>(kSmallest) * kSmallest);
}

TEST(SumOfSquares, shows_nan_and_infinity_wherever_they_are) {
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

TEST(ClipCoefficient, is_one_for_every_norm_where_the_limit_is_infinite) {
  const double infinite = std::numeric_limits<double>::infinity();
  for (const double norm : {0.0, 4.0, 1e300, infinite, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(clip_coefficient(norm, infinite), 1.0f) << norm;
  }
}

TEST(ClipCoefficient, is_zero_for_an_infinite_norm_and_nan_for_nan) {
  EXPECT_EQ(clip_coefficient(std::numeric_limits<double>::infinity(), 1.0), 0.0f);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::numeric_limits<double>::quiet_NaN(), 1.0)));
}

TEST(CombinedNorm, is_the_root_of_the_sum_in_order) {
  EXPECT_EQ(combined_norm({}), 0.0);
  EXPECT_EQ(combined_norm(std::array{9.0, 16.0}), 5.0);
}

TEST(ClipCoefficient, of_any_nan_is_one_without_a_payload_which_a_store_of_two_bytes_would_take_for_a_zero) {
  for (const std::uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
    const double norm = static_cast<double>(std::bit_cast<float>(bits));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(clip_coefficient(norm, 1.0)) & 0x7fffffffu, 0x7fc00000u);
  }
}

}  // namespace
}  // namespace terrace
