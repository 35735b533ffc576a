/// bfloat16 as its 16 bits, for code that is not vectorised: tests, references, single values.
///
/// Widening appends 16 zero bits and is exact. Rounding goes to the nearest bfloat16, ties away from zero:
/// `(bits + 0x8000) >> 16`. Ties away rather than to even, because a rounded value and the 16 bits that rounding drops
/// then give the fp32 value back, for every finite one. What follows from the rule:
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

}  // namespace terrace
