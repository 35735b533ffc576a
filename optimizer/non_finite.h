/// What a step does whose gradients are not all finite.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace terrace {

/// Gradients are judged as a whole, by their norm: one NaN or infinite element is enough.
enum class NonFinite : std::uint8_t {
  pass,  ///< they go through the arithmetic; nobody looks
  skip,  ///< the step changes nothing, advances no count, and is counted
  error  ///< the same, and the next to wait for the update gets a NonFiniteGradient
};

/// By its name. Throws ConfigError for any other.
NonFinite non_finite(std::string_view name);

/// What NonFinite::error throws. `parameter`: whose gradient it is, as a message names it.
NonFiniteGradient non_finite_gradient(std::int64_t step, const std::string& parameter);

}  // namespace terrace
