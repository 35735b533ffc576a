/// printf into a string.
#pragma once

#include <array>
#include <cstdio>
#include <string>

namespace terrace {

/// At most 299 characters; what is longer is cut.
template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 300> text;
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

}  // namespace terrace
