/// bfloat16 as its 16 bits, for code that is not vectorised: tests, references, single values.
///
/// Widening appends 16 zero bits and is exact. Rounding goes to the nearest bfloat16, ties away from zero:
/// `(bits + 0x8000) >> 16`. Ties away rather than to even, because a rounded value and the 16 bits that rounding drops
/// then give the fp32 value back, for every finite one (`joined`). What follows from the rule:
///   - widen, then round, gives the same bits back for everything but a signalling NaN, which comes back quiet;
///   - a finite value of at least 2^128 - 2^119 (halfway between the largest bfloat16 and 2^128) rounds to infinity;
///   - infinities and signed zeros are kept;
///   - a NaN stays a NaN with its sign and upper payload bits, and is made quiet. It is never rounded: the addition
///     could carry through its exponent and turn it into a zero.
#pragma once

#include <bit>
#include <cstdint>

namespace terrace {

constexpr float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x0040u : (bits + 0x8000u) >> 16);
}

/// The fp32 value that was rounded to these bits and whose lower half was this. Where that would be a NaN beside bits
/// that are none, which somebody else must have written, it is their value alone.
constexpr float joined(std::uint16_t upper, std::uint16_t lower) noexcept {
  const std::int32_t rounded_off = static_cast<std::int16_t>(lower);
  const std::uint32_t alone = static_cast<std::uint32_t>(upper) << 16;
  const std::uint32_t bits = alone + static_cast<std::uint32_t>(rounded_off);
  return std::bit_cast<float>((bits & 0x7fffffffu) > 0x7f800000u ? alone : bits);
}

constexpr std::uint16_t lower_half(float value) noexcept {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value));
}

/// Rounds up with the probability that the value's place between its neighbours stands for, by a hash of its own bits
/// and the seed. NaN, infinity and what bfloat16 represents are as above.
constexpr std::uint16_t float_to_bfloat16_at_random(float value, std::uint32_t seed) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return float_to_bfloat16(value);
  }
  const std::uint32_t hash = (bits ^ seed) * 0x9e3779b1u;
  return static_cast<std::uint16_t>((bits + (hash >> 16)) >> 16);
}

}  // namespace terrace
