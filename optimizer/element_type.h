/// The types of elements that the update reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace {

enum class ElementType : std::uint8_t { float32, bfloat16, float16 };

constexpr std::size_t bytes_of(ElementType type) noexcept { return type == ElementType::float32 ? 4 : 2; }

}  // namespace terrace
