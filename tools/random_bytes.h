/// Bytes that a drive cannot make smaller, for whoever measures one.
#pragma once

#include <cstddef>
#include <span>

namespace terrace {

/// The same ones each time. The memory is a whole number of words of 8 bytes, and aligned to them.
void fill_with_random_bytes(std::span<std::byte> memory);

}  // namespace terrace
