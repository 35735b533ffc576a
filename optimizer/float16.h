/// IEEE 754 half precision as its 16 bits, for code that is not vectorised.
#pragma once

#include <bit>
#include <cstdint>

namespace terrace {

/// Exact; a NaN keeps its payload.
constexpr float float16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero, or subnormal
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t shifted = magnitude << 13;
  return std::bit_cast<float>(sign | (magnitude < 0x7c00u ? shifted + ((127u - 15u) << 23) : shifted | 0x7f800000u));
}

}  // namespace terrace
