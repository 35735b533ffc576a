/// The little JSON that a trace is made of.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace terrace {

/// The text in quotes; control characters become spaces.
inline std::string json_quoted(std::string_view text) {
  std::string result = "\"";
  for (const char each : text) {
    if (static_cast<unsigned char>(each) < 0x20) {
      result += ' ';
      continue;
    }
    if (each == '"' || each == '\\') {
      result += '\\';
    }
    result += each;
  }
  return result + '"';
}

/// Nanoseconds as microseconds, exactly.
inline std::string json_microseconds(std::int64_t ns) {
  char text[40];
  const std::int64_t size = ns < 0 ? -ns : ns;
  std::snprintf(text, sizeof text, "%s%lld.%03d", ns < 0 ? "-" : "", static_cast<long long>(size / 1000),
                static_cast<int>(size % 1000));
  return text;
}

/// An object, member by member.
class JsonObject {
 public:
  JsonObject& add(std::string_view key, std::string_view value) { return raw(key, json_quoted(value)); }
  JsonObject& add(std::string_view key, std::uint64_t value) { return raw(key, std::to_string(value)); }
  /// `value` is JSON.
  JsonObject& raw(std::string_view key, std::string_view value) {
    text_ += (text_.empty() ? "" : ",") + json_quoted(key) + ":";
    text_ += value;
    return *this;
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

}  // namespace terrace
