#include "integration/checkpoint_checksum.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <new>
#include <xxhash.h>

namespace terrace {

void CheckpointChecksum::Free::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }

CheckpointChecksum::CheckpointChecksum() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(state_.get());
}

void CheckpointChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

std::uint64_t CheckpointChecksum::value() const { return XXH3_64bits_digest(state_.get()); }

std::uint64_t checksum_of(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

std::string to_hex(std::uint64_t value) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(value));
  return digits.data();
}

std::optional<std::uint64_t> from_hex(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && to_hex(value) == text ? std::optional(value) : std::nullopt;
}

}  // namespace terrace
