/// Byte sizes as people write and read them. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace terrace {

/// The bytes in `text`: a number, decimals allowed, and one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB
/// (powers of 1024), with or without blanks between and around them. A fraction of a byte is dropped.
/// Throws ConfigError, which shows a good value, for anything else and for what 64 bits cannot hold.
std::uint64_t parse_bytes(std::string_view text);

/// For people: "64MiB" where that is exact, otherwise rounded to two decimals, one from 100 on: "1.50GiB", "200.3MiB".
std::string format_bytes(std::uint64_t bytes);

/// For files: the largest unit that is exact, "1536MiB" or "100GB". `parse_bytes` gives the same number back.
std::string format_bytes_exactly(std::uint64_t bytes);

}  // namespace terrace
