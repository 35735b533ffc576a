#include "base/units.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "base/text.h"

namespace terrace {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr std::array<Unit, 5> kBinaryUnits = {
    {{"B", 1}, {"KiB", 1ULL << 10}, {"MiB", 1ULL << 20}, {"GiB", 1ULL << 30}, {"TiB", 1ULL << 40}}};
constexpr std::array<Unit, 4> kDecimalUnits = {
    {{"KB", 1'000}, {"MB", 1'000'000}, {"GB", 1'000'000'000}, {"TB", 1'000'000'000'000}}};

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw ConfigError("\"" + excerpt(text) + "\" is not a size: " + why,
                    "write a number and a unit, such as \"512MiB\" or \"1.5GB\"; the units are B, KB, MB, GB, TB, KiB, "
                    "MiB, GiB and TiB");
}

/// Takes the digits at the front off `rest`.
std::string_view take_digits(std::string_view& rest) {
  const std::size_t end = std::min(rest.find_first_not_of("0123456789"), rest.size());
  const std::string_view digits = rest.substr(0, end);
  rest.remove_prefix(end);
  return digits;
}

std::uint64_t unit_bytes(std::string_view name, std::string_view text) {
  for (const Unit& unit : kBinaryUnits) {
    if (unit.name == name) return unit.bytes;
  }
  for (const Unit& unit : kDecimalUnits) {
    if (unit.name == name) return unit.bytes;
  }
  refuse(text, name.empty() ? "the unit is missing" : "unknown unit \"" + excerpt(name) + "\"");
}

/// `value * factor + term`, if 64 bits hold it.
bool multiply_add(std::uint64_t& value, std::uint64_t factor, std::uint64_t term) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  if (value > (kMost - term) / factor) return false;
  value = value * factor + term;
  return true;
}

}  // namespace

std::uint64_t parse_bytes(std::string_view text) {
  std::string_view rest = trimmed(text);
  if (rest.empty()) refuse(text, "it is empty");
  if (rest.front() == '-') refuse(text, "it is negative");
  const std::string_view whole = take_digits(rest);
  if (whole.empty()) refuse(text, "it does not begin with a number");
  std::string_view fraction;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    fraction = take_digits(rest);
    if (fraction.empty()) refuse(text, "digits are missing after the point");
  }
  const std::uint64_t unit = unit_bytes(trimmed(rest), text);

  // From the last digit to the first, so that only a whole byte's fraction is lost, however many digits there are.
  std::uint64_t fraction_bytes = 0;
  for (auto digit = fraction.rbegin(); digit != fraction.rend(); ++digit) {
    fraction_bytes = (static_cast<std::uint64_t>(*digit - '0') * unit + fraction_bytes) / 10;
  }
  std::uint64_t bytes = 0;
  bool fits = true;
  for (const char digit : whole) fits = fits && multiply_add(bytes, 10, static_cast<std::uint64_t>(digit - '0'));
  if (!fits || !multiply_add(bytes, unit, fraction_bytes)) refuse(text, "it is too large");
  return bytes;
}

std::string format_bytes(std::uint64_t bytes) {
  std::size_t index = 0;
  while (index + 1 < kBinaryUnits.size() && bytes >= kBinaryUnits[index + 1].bytes) ++index;
  if (bytes % kBinaryUnits[index].bytes == 0) {
    return std::to_string(bytes / kBinaryUnits[index].bytes) + std::string(kBinaryUnits[index].name);
  }
  double value = static_cast<double>(bytes) / static_cast<double>(kBinaryUnits[index].bytes);
  if (value >= 1023.95 && index + 1 < kBinaryUnits.size()) {  // would be rounded to 1024.0
    ++index;
    value = 1.0;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f", value < 99.995 ? 2 : 1, value);
  return text.data() + std::string(kBinaryUnits[index].name);
}

std::string format_bytes_exactly(std::uint64_t bytes) {
  Unit largest = kBinaryUnits.front();
  const auto try_unit = [&](const Unit& unit) {
    if (bytes > 0 && bytes % unit.bytes == 0 && unit.bytes > largest.bytes) largest = unit;
  };
  std::for_each(kBinaryUnits.begin(), kBinaryUnits.end(), try_unit);
  std::for_each(kDecimalUnits.begin(), kDecimalUnits.end(), try_unit);
  return std::to_string(bytes / largest.bytes) + std::string(largest.name);
}

}  // namespace terrace
