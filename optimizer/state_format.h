/// What an optimizer keeps of each element beside its parameter, and in how many bytes.
///
/// | format         | master beside bf16 | momentum | variance | beside bf16 | beside fp32 |
/// |----------------|--------------------|----------|----------|-------------|-------------|
/// | float32        | fp32               | fp32     | fp32     | 12 B        | 8 B         |
/// | split          | its lower half     | fp32     | fp32     | 10 B        | 8 B         |
/// | split_bfloat16 | its lower half     | bf16     | bf16     | 6 B         | 4 B         |
///
/// The lower half is the 16 bits that rounding the master to its parameter drops (optimizer/bfloat16.h): with the
/// parameter it is the whole fp32 master again, so that `split` trains bit for bit as `float32` does. Where somebody
/// else writes a parameter, `float32` starts its master from what was written; `split` cannot tell, and keeps the lower
/// half, which moves the master by at most half a unit in the parameter's last place.
///
/// bf16 momentum is rounded to the nearest, ties away. bf16 variance is rounded up or down at random, in proportion: at
/// a beta2 of 0.999 a step changes it by less than half of its last place, and the nearest would be where it was
/// before, for ever (the idea: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The randomness is
/// a hash of the element's own new bits and the step's number, so that results depend on nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "optimizer/element_type.h"

namespace terrace {

enum class StateFormat : std::uint8_t { float32, split, split_bfloat16 };

/// By its name in the table. Throws ConfigError for any other.
StateFormat state_format(std::string_view name);

constexpr std::size_t master_bytes(StateFormat format, ElementType parameter) noexcept {
  if (parameter == ElementType::float32) {
    return 0;
  }
  return format == StateFormat::float32 ? 4 : 2;
}

/// Of momentum and of variance.
constexpr ElementType moment_type(StateFormat format) noexcept {
  return format == StateFormat::split_bfloat16 ? ElementType::bfloat16 : ElementType::float32;
}

}  // namespace terrace
