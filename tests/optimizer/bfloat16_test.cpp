#include "optimizer/bfloat16.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace terrace {
namespace {

std::uint16_t round_bits(std::uint32_t bits) { return float_to_bfloat16(std::bit_cast<float>(bits)); }

bool is_nan(std::uint32_t bfloat16) { return (bfloat16 & 0x7fffu) > 0x7f80u; }

TEST(Bfloat16, widening_then_rounding_is_the_identity_but_for_nan) {
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    const auto bits = static_cast<std::uint16_t>(upper);
    if (is_nan(upper)) {
      EXPECT_EQ(float_to_bfloat16(bfloat16_to_float(bits)), bits | 0x0040u) << std::hex << upper;
    } else {
      EXPECT_EQ(float_to_bfloat16(bfloat16_to_float(bits)), bits) << std::hex << upper;
    }
  }
}

TEST(Bfloat16, rounds_every_upper_half_to_nearest_with_ties_away_from_zero) {
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    if ((upper & 0x7fffu) >= 0x7f80u) continue;
    // One more in magnitude is the next bfloat16 outwards; past the largest finite one it is infinity.
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x1234u, 0x7fffu}) {
      EXPECT_EQ(round_bits(upper << 16 | lower), upper) << std::hex << upper << " " << lower;
    }
    for (const std::uint32_t lower : {0x8000u, 0x8001u, 0xabcdu, 0xffffu}) {
      EXPECT_EQ(round_bits(upper << 16 | lower), upper + 1) << std::hex << upper << " " << lower;
    }
  }
}

TEST(Bfloat16, keeps_every_nan_a_quiet_nan_of_its_sign) {
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu}) {
      if ((upper & 0x7fffu) < 0x7f80u || ((upper & 0x7fffu) == 0x7f80u && lower == 0)) continue;
      const std::uint16_t rounded = round_bits(upper << 16 | lower);
      EXPECT_EQ(rounded, upper | 0x0040u) << std::hex << upper << " " << lower;
      EXPECT_TRUE(is_nan(rounded));
    }
  }
}

TEST(Bfloat16, keeps_infinities_and_signed_zeros) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_to_bfloat16(kInfinity), 0x7f80);
  EXPECT_EQ(float_to_bfloat16(-kInfinity), 0xff80);
  EXPECT_EQ(float_to_bfloat16(0.0f), 0x0000);
  EXPECT_EQ(float_to_bfloat16(-0.0f), 0x8000);
  EXPECT_EQ(bfloat16_to_float(0x3f80), 1.0f);
}

}  // namespace
}  // namespace terrace
