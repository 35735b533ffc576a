#include "base/config_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/nearest.h"
#include "base/text.h"
#include "base/units.h"

namespace terrace::config_detail {
namespace {

constexpr double kSumTolerance = 1e-6;
constexpr std::string_view kAcceptedSize = "a size above zero, such as \"512MiB\", or \"auto\"";
constexpr std::string_view kAcceptedRate = "a rate above zero, such as \"1GB/s\", or \"unlimited\"";
constexpr std::string_view kAcceptedShares = "\"auto\", or shares such as { device = 0.25, host = 0.75 }";

/// An integer or a float, if it is one.
std::optional<double> number(const toml::node& node) {
  if (const auto* integer = node.as_integer()) return static_cast<double>(integer->get());
  if (const auto* floating = node.as_floating_point()) return floating->get();
  return std::nullopt;
}

/// More than any machine has, and few enough that sums of sizes do not overflow.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60U;

/// The fewest digits that are read back as the same number.
std::string shortest(double number) {
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number);
  std::string text(buffer.data(), result.ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";  // otherwise TOML reads an integer
  return text;
}

/// The value as a message shows it, on one line.
std::string shown(const toml::node& node) {
  if (node.is_array_of_tables()) return "a list of tables";
  if (node.is_table() && !node.as_table()->is_inline()) return "a table";
  std::string text = to_text(node);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return excerpt(text);
}

}  // namespace

std::string Origin::prefix(const toml::source_region& region) const {
  if (!has_lines || region.begin.line == 0) return name + ": ";
  return name + ":" + std::to_string(region.begin.line) + ": ";
}

std::optional<std::uint64_t> Value::optional_size() const {
  const std::optional<std::uint64_t> bytes = size_or_auto(kAcceptedSize);
  if (bytes == 0) refuse(kAcceptedSize);
  return bytes;
}

std::optional<std::uint64_t> Value::optional_size_or_none(std::uint64_t least) const {
  const std::string accepted = "a size of at least \"" + format_bytes_exactly(least) + "\", \"0B\", or \"auto\"";
  const std::optional<std::uint64_t> bytes = size_or_auto(accepted);
  if (bytes && *bytes != 0 && *bytes < least) refuse(accepted);
  return bytes;
}

std::optional<std::uint64_t> Value::optional_size_in_units(std::uint64_t unit, std::uint64_t most) const {
  const std::string accepted =
      "a multiple of \"" + format_bytes_exactly(unit) + "\" up to \"" + format_bytes_exactly(most) + "\", or \"auto\"";
  const std::optional<std::uint64_t> bytes = size_or_auto(accepted);
  if (bytes && (*bytes == 0 || *bytes % unit != 0 || *bytes > most)) refuse(accepted);
  return bytes;
}

std::optional<std::uint64_t> Value::size_or_auto(std::string_view accepted) const {
  if (is("auto")) return std::nullopt;
  const auto* text = node_.as_string();
  if (text == nullptr) {
    const std::optional<double> value = number(node_);
    const bool lacks_unit = value && *value >= 0 && std::isfinite(*value);
    refuse(accepted, lacks_unit ? "a size is a string with a unit: \"" + to_text(node_) + "B\"" : "");
  }
  std::uint64_t bytes = 0;
  try {
    bytes = parse_bytes(text->get());
  } catch (const ConfigError& error) {
    fail(error.message() + "; accepted: " + std::string(accepted), error.hint());
  }
  if (bytes > kMostBytes) refuse(std::string(accepted) + ", up to \"" + format_bytes_exactly(kMostBytes) + "\"");
  return bytes;
}

std::optional<std::uint64_t> Value::optional_byte_rate() const {
  if (is("unlimited")) return std::nullopt;
  const auto* text = node_.as_string();
  constexpr std::string_view per_second = "/s";
  if (text == nullptr || !std::string_view(text->get()).ends_with(per_second)) refuse(kAcceptedRate);
  std::uint64_t bytes = 0;
  try {
    bytes = parse_bytes(std::string_view(text->get()).substr(0, text->get().size() - per_second.size()));
  } catch (const ConfigError& error) {
    fail(error.message() + "; accepted: " + std::string(kAcceptedRate), error.hint());
  }
  if (bytes == 0) refuse(kAcceptedRate);
  return bytes;
}

std::string Value::one_of(const std::vector<std::string_view>& choices) const {
  std::string accepted;
  for (const std::string_view choice : choices) {
    if (is(choice)) return std::string(choice);
    accepted += (accepted.empty() ? "\"" : ", \"") + std::string(choice) + "\"";
  }
  refuse(accepted);
}

std::int64_t Value::whole_number(std::int64_t least, std::int64_t most) const {
  const auto* integer = node_.as_integer();
  if (integer == nullptr || integer->get() < least || integer->get() > most) {
    refuse("a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return integer->get();
}

double Value::rate(double most) const {
  const auto value = number(node_);
  if (value && *value >= 0 && *value <= most) return *value;
  refuse(most == std::numeric_limits<double>::max() ? "a finite number of 0 or more"
                                                    : "a number from 0 to " + shortest(most));
}

double Value::share() const {
  const auto value = number(node_);
  if (!value || !(*value >= 0 && *value <= 1)) refuse("a number from 0 to 1");
  return *value;
}

std::vector<std::filesystem::path> Value::paths() const {
  const auto path = [&](const toml::node& node) -> std::filesystem::path {
    const auto* text = node.as_string();
    if (text == nullptr || text->get().empty()) {
      Value(key_, node, origin_).refuse("a list of paths, such as [\"/data/a\", \"/data/b\"]");
    }
    if (text->get().find('\0') != std::string::npos) {
      Value(key_, node, origin_).refuse("a path, in which no byte is 0");
    }
    return text->get();
  };
  const auto* list = node_.as_array();
  if (list == nullptr) return {path(node_)};
  std::vector<std::filesystem::path> paths;
  for (const toml::node& node : *list) paths.push_back(path(node));
  return paths;
}

std::optional<Config::Shares> Value::optional_shares() const {
  if (is("auto")) return std::nullopt;
  const auto* table = node_.as_table();
  if (table == nullptr) refuse(kAcceptedShares);
  static const std::array<std::string, 3> kTiers = {"device", "host", "nvme"};
  Config::Shares shares;
  const std::array<double*, 3> fields = {&shares.device, &shares.host, &shares.nvme};
  for (const auto& [tier, node] : *table) {
    std::size_t index = 0;
    while (index < kTiers.size() && tier.str() != kTiers[index]) ++index;
    if (index == kTiers.size()) {
      throw ConfigError(origin_.prefix(tier.source()) + key_ + ": unknown tier \"" + std::string(tier.str()) +
                            "\"; accepted: device, host, nvme",
                        "did you mean \"" + nearest_name(tier.str(), kTiers) + "\"?");
    }
    *fields[index] = Value(key_ + "." + kTiers[index], node, origin_).share();
  }
  const double sum = shares.device + shares.host + shares.nvme;
  if (!(std::abs(sum - 1) <= kSumTolerance)) {
    std::ostringstream text;
    text << "the shares sum to " << sum << ", not to 1";
    refuse(kAcceptedShares, text.str());
  }
  return shares;
}

bool Value::is(std::string_view text) const {
  const auto* string = node_.as_string();
  return string != nullptr && string->get() == text;
}

void Value::refuse(std::string_view accepted, const std::string& hint) const {
  fail("found " + shown(node_) + "; accepted: " + std::string(accepted), hint);
}

void Value::fail(const std::string& what, const std::string& hint) const {
  throw ConfigError(origin_.prefix(node_.source()) + key_ + ": " + what, hint);
}

// toml++ writes 0.1 as 0.10000000000000001, so numbers, and tables of them, are written here.
std::string to_text(const toml::node& node) {
  const auto* floating = node.as_floating_point();
  if (floating != nullptr && std::isfinite(floating->get())) return shortest(floating->get());
  if (node.is_table() && node.as_table()->is_inline() && !node.as_table()->empty()) {
    std::string text;
    for (const auto& [key, value] : *node.as_table()) {
      text += (text.empty() ? "{ " : ", ") + std::string(key.str()) + " = " + to_text(value);
    }
    return text + " }";
  }
  std::ostringstream text;
  text << toml::toml_formatter(node, toml::format_flags::allow_unicode_strings);
  return text.str();
}

}  // namespace terrace::config_detail
