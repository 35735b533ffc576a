/// One value of a configuration, with its key and where it stands: read it as what the key needs, or refuse it.
///
/// Internal to the configuration. Every reader throws ConfigError if the value is not what it reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <toml++/toml.h>

#include "base/config.h"

namespace terrace::config_detail {

/// Where values come from, for messages.
struct Origin {
  std::string name;       // a file's path, or another name for the text
  bool has_lines = true;  // false where a line number would tell nobody anything

  /// "terrace.toml:12: "
  std::string prefix(const toml::source_region& region) const;
};

class Value {
 public:
  /// Keeps references to the node and to the origin.
  Value(std::string key, const toml::node& node, const Origin& origin)
      : key_(std::move(key)), node_(node), origin_(origin) {}

  /// A size with a unit; absent for "auto".
  std::optional<std::uint64_t> optional_size() const;

  /// The same, and 0 for none, but nothing between that and `least`.
  std::optional<std::uint64_t> optional_size_or_none(std::uint64_t least) const;

  /// A size of whole units, at least one and at most `most`.
  std::optional<std::uint64_t> optional_size_in_units(std::uint64_t unit, std::uint64_t most) const;

  /// A size a second, such as "1GB/s"; absent for "unlimited".
  std::optional<std::uint64_t> optional_byte_rate() const;

  std::string one_of(const std::vector<std::string_view>& choices) const;
  std::int64_t whole_number(std::int64_t least, std::int64_t most) const;

  /// A finite number of 0 or more, and at most `most`.
  double rate(double most) const;

  /// A list of strings; one string is a list of one.
  std::vector<std::filesystem::path> paths() const;

  /// Shares of the tiers; absent for "auto".
  std::optional<Config::Shares> optional_shares() const;

  /// Whether it is this string.
  bool is(std::string_view text) const;

  /// Throws ConfigError: "terrace.toml:3: device.memory: found 5; accepted: ...".
  [[noreturn]] void refuse(std::string_view accepted, const std::string& hint = "") const;

  /// Throws ConfigError with a message of its own after the place and the key.
  [[noreturn]] void fail(const std::string& what, const std::string& hint = "") const;

 private:
  std::optional<std::uint64_t> size_or_auto(std::string_view accepted) const;
  double share() const;

  std::string key_;
  const toml::node& node_;
  const Origin& origin_;
};

/// The node as TOML text. Keys of inline tables are written without quotes.
std::string to_text(const toml::node& node);

}  // namespace terrace::config_detail
