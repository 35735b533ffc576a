/// Small operations on text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace terrace {

/// Without the blanks and tabs at both ends.
constexpr std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// As a message shows it: cut where it would swamp the rest, not inside a UTF-8 character.
inline std::string excerpt(std::string_view text) {
  constexpr std::size_t kMost = 80;
  if (text.size() <= kMost) return std::string(text);
  std::size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace terrace
