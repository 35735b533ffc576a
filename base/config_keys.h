/// The keys of a configuration, each with how it is read and written. This table is the only place that lists them.
///
/// Internal to the configuration.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "base/config_value.h"

namespace terrace::config_detail {

struct Key {
  std::string name;                                                          // "device.memory"
  std::function<void(const Value&, Config&)> read;                           // throws ConfigError
  std::function<void(const Config&, toml::table&, std::string_view)> write;  // as an entry of the section's table

  std::string section() const { return name.substr(0, name.find('.')); }  // "device"
  std::string leaf() const { return name.substr(name.find('.') + 1); }    // "memory"
};

/// All keys, those of a section together.
const std::vector<Key>& keys();

/// Null if there is no such key.
const Key* find_key(std::string_view name);

/// The names of all keys and of all sections.
const std::vector<std::string>& key_names();
const std::vector<std::string>& section_names();

}  // namespace terrace::config_detail
