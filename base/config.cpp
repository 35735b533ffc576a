#include "base/config.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/config_keys.h"
#include "base/config_value.h"
#include "base/error.h"
#include "base/nearest.h"
#include "base/text.h"
#include "base/units.h"

namespace terrace {
namespace {

using config_detail::Key;
using config_detail::Origin;
using config_detail::Value;

bool is_section(std::string_view name) {
  const auto& names = config_detail::section_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// `where` is a prefix that names the place.
[[noreturn]] void refuse_unknown(const std::string& where, const std::string& name, bool as_section) {
  const auto& known = as_section ? config_detail::section_names() : config_detail::key_names();
  const std::string nearest = nearest_name(name, known);
  if (as_section) throw ConfigError(where + "unknown table [" + name + "]", "did you mean [" + nearest + "]?");
  throw ConfigError(where + "unknown key \"" + name + "\"", "did you mean \"" + nearest + "\"?");
}

void read_table(const toml::table& table, const std::string& section, const Origin& origin, Config& config) {
  for (const auto& [key, node] : table) {
    const std::string name = (section.empty() ? "" : section + ".") + std::string(key.str());
    if (const Key* known = config_detail::find_key(name)) {
      known->read(Value(name, node, origin), config);
    } else if (section.empty() && is_section(name)) {
      if (!node.is_table()) Value(name, node, origin).refuse("a table: [" + name + "], then its keys");
      read_table(*node.as_table(), name, origin, config);
    } else {
      refuse_unknown(origin.prefix(key.source()), name, section.empty() && node.is_table());
    }
  }
}

/// What `text` means to the right of an equals sign: one TOML value, or else itself.
toml::table parse_right_side(std::string_view text) {
  try {
    toml::table parsed = toml::parse("value = " + std::string(text));
    if (parsed.size() == 1) return parsed;
  } catch (const toml::parse_error&) {  // NOLINT(bugprone-empty-catch): it is a string without quotes
  }
  return toml::table{{"value", text}};
}

void apply_assignment(std::string_view assignment, Config& config) {
  const Origin origin{"set \"" + std::string(assignment) + "\"", false};
  const std::size_t equals = assignment.find('=');
  const std::string name(trimmed(assignment.substr(0, equals)));
  if (equals == std::string_view::npos || name.empty()) {
    throw ConfigError(origin.name + ": found no key and value", "write key=value, as in device.memory=64MiB");
  }
  const Key* key = config_detail::find_key(name);
  if (key == nullptr && is_section(name)) {
    throw ConfigError(origin.name + ": [" + name + "] is a table",
                      "set its keys one by one, as in device.memory=64MiB");
  }
  if (key == nullptr) refuse_unknown(origin.name + ": ", name, false);
  const toml::table parsed = parse_right_side(trimmed(assignment.substr(equals + 1)));
  key->read(Value(name, *parsed.get("value"), origin), config);
}

toml::table to_table(const Config& config) {
  toml::table table;
  for (const Key& key : config_detail::keys()) {
    auto section = table.insert(key.section(), toml::table{}).first;  // or the one that is there
    key.write(config, *section->second.as_table(), key.leaf());
  }
  return table;
}

/// Throws unless the values go together.
void check_together(const Config& config, const std::string& name) {
  const auto check_shares = [&](const char* kind, const std::optional<Config::Shares>& shares) {
    if (!shares || shares->nvme <= 0 || !config.nvme.paths.empty()) return;
    std::ostringstream message;
    message << name << ": placement." << kind << " puts a share of " << shares->nvme
            << " on nvme, but nvme.paths is empty";
    throw ConfigError(message.str(), "name a folder on a fast disk: nvme.paths = [\"/data/terrace\"]");
  };
  check_shares("parameters", config.placement.parameters);
  check_shares("gradients", config.placement.gradients);
  check_shares("optimizer", config.placement.optimizer);
  if (config.placement.activations == "nvme" && config.nvme.paths.empty()) {
    throw ConfigError(name + ": placement.activations is \"nvme\", but nvme.paths is empty",
                      "name a folder on a fast disk: nvme.paths = [\"/data/terrace\"]");
  }
  if (config.device.kind == "cuda" && (config.device.link || config.device.latency_us != 0)) {
    throw ConfigError(
        name + ": device.link and device.latency_us are of the emulated device, but device.kind is \"cuda\"",
        "leave them out, or set device.kind to \"emulated\"");
  }
  if (config.device.chunks && config.device.memory && *config.device.chunks > *config.device.memory) {
    throw ConfigError(name + ": device.chunks (" + format_bytes_exactly(*config.device.chunks) +
                          ") is more than device.memory (" + format_bytes_exactly(*config.device.memory) + ")",
                      "chunks are part of what device.memory counts: lower device.chunks or leave it out");
  }
}

std::string read_text(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& why) -> void {
    throw ConfigError("cannot read configuration " + path.string() + ": " + why);
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(std::generic_category().message(EISDIR));
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(std::generic_category().message(errno));
  constexpr std::size_t most_bytes = std::size_t{1} << 20U;  // a device may have no end
  std::string text(most_bytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) fail("reading failed");
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > most_bytes) fail("it has more than " + format_bytes(most_bytes));
  return text;
}

}  // namespace

Config Config::load(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  return parse(read_text(path), path.string(), overrides);
}

Config Config::parse(std::string_view text, std::string_view name, const std::vector<std::string>& overrides) {
  const Origin origin{std::string(name)};
  Config config;
  try {
    read_table(toml::parse(text), "", origin, config);
  } catch (const toml::parse_error& error) {
    throw ConfigError(origin.prefix(error.source()) + std::string(error.description()));
  }
  for (const std::string& assignment : overrides) apply_assignment(assignment, config);
  check_together(config, overrides.empty() ? origin.name : origin.name + " with what overrides it");
  return config;
}

Config& Config::set(std::string_view assignment) {
  Config changed = *this;
  apply_assignment(assignment, changed);
  changed.validate();
  return *this = std::move(changed);
}

Config& Config::set_all(const std::vector<std::string>& assignments) {
  Config changed = *this;
  for (const std::string& assignment : assignments) apply_assignment(assignment, changed);
  changed.validate();
  return *this = std::move(changed);
}

// What each key accepts is known to its reader alone, so every value is written and read again.
void Config::validate() const {
  const Origin origin{"configuration", false};
  Config scratch;
  read_table(to_table(*this), "", origin, scratch);
  check_together(*this, origin.name);
}

std::string to_toml(const Config& config) {
  const toml::table table = to_table(config);
  std::string text;
  std::string section;
  for (const Key& key : config_detail::keys()) {
    if (key.section() != section) {
      text += (section.empty() ? "[" : "\n[") + key.section() + "]\n";
      section = key.section();
    }
    text += key.leaf() + " = " + config_detail::to_text(*table[section][key.leaf()].node()) + "\n";
  }
  return text;
}

}  // namespace terrace
