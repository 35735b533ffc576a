/// The checksum of what is kept on NVMe: XXH3, 64 bits, by the widest instructions of this machine. Its value is the
/// same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace terrace {

std::uint64_t checksum_of(std::span<const std::byte> bytes, std::uint64_t seed = 0) noexcept;

}  // namespace terrace
