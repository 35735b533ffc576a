/// The checksum of bytes that come in pieces: the same 64 bits of XXH3 however they are cut.
///
/// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace terrace {

class CheckpointChecksum {
 public:
  CheckpointChecksum();
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

std::uint64_t checksum_of(std::string_view text);

/// As 16 lower-case hexadecimal digits, and back; nothing if the text is not that.
std::string to_hex(std::uint64_t value);
std::optional<std::uint64_t> from_hex(std::string_view text);

}  // namespace terrace
