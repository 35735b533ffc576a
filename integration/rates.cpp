#include "integration/rates.h"

#include <cmath>
#include <ctime>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include <nlohmann/json.hpp>

#include "base/config.h"
#include "base/log.h"
#include "base/machine.h"
#include "integration/user_cache.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 2;
constexpr std::uintmax_t kMostBytes = 1U << 20U;

/// What rates are true of.
Json this_machine() {
  return {{"cpu", cpu_model()}, {"cores", machine_threads()}, {"memory_bytes", machine_memory_bytes()}};
}

/// As the file and the report of the command name it.
std::string key_of(const char* rate) { return std::string(rate) + "_bytes_per_second"; }

double rate_in(const Json& json, const char* name) {
  const double rate = json.at(key_of(name)).get<double>();
  if (!std::isfinite(rate) || rate <= 0) throw std::runtime_error(key_of(name) + " is no rate");
  return rate;
}

std::size_t count_in(const Json& json, const char* name, std::size_t unit, std::size_t most) {
  const Json& number = json.at(name);
  if (!number.is_number_unsigned() || number.get<std::size_t>() == 0 || number.get<std::size_t>() % unit != 0 ||
      number.get<std::size_t>() > most) {
    throw std::runtime_error(std::string(name) + " is " + number.dump());
  }
  return number.get<std::size_t>();
}

MemoryRates memory_from(const Json& json) {
  return {rate_in(json, "copy_one_core"), rate_in(json, "copy"), rate_in(json, "read"), rate_in(json, "write"),
          json.at("measured_at").get<std::string>()};
}

DriveRates drive_from(const Json& json) {
  return {rate_in(json, "read"),
          rate_in(json, "write"),
          json.at("engine").get<std::string>(),
          count_in(json, "block_bytes", Config::Io::block_unit, Config::Io::most_block),
          count_in(json, "depth", 1, Config::Io::most_depth),
          json.at("direct").get<bool>(),
          json.at("measured_at").get<std::string>()};
}

LinkRates link_from(const Json& json) {
  return {rate_in(json, "in"), rate_in(json, "out"), json.at("measured_at").get<std::string>()};
}

Rates rates_from(const Json& json) {
  Rates rates;
  if (json.contains("memory")) rates.memory = memory_from(json.at("memory"));
  for (const auto& [path, each] : json.at("paths").items()) rates.paths[path] = drive_from(each);
  for (const auto& [name, each] : json.at("links").items()) rates.links[name] = link_from(each);
  return rates;
}

Json json_of(const Rates& rates) {
  Json json;
  if (const auto& memory = rates.memory) {
    json["memory"] = {{key_of("copy_one_core"), memory->copy_one_core},
                      {key_of("copy"), memory->copy},
                      {key_of("read"), memory->read},
                      {key_of("write"), memory->write},
                      {"measured_at", memory->measured_at}};
  }
  json["paths"] = Json::object();
  for (const auto& [path, each] : rates.paths) {
    json["paths"][path] = {{key_of("read"), each.read},       {key_of("write"), each.write}, {"engine", each.engine},
                           {"block_bytes", each.block_bytes}, {"depth", each.depth},         {"direct", each.direct},
                           {"measured_at", each.measured_at}};
  }
  json["links"] = Json::object();
  for (const auto& [name, each] : rates.links) {
    json["links"][name] = {{key_of("in"), each.in}, {key_of("out"), each.out}, {"measured_at", each.measured_at}};
  }
  return json;
}

std::string text_of(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

/// Why what was read is of no use here; empty where it is.
std::string why_foreign(const Json& json) {
  if (json.at("version") != kVersion) return "it is of version " + json.at("version").dump();
  if (json.at("machine") != this_machine()) return "it was measured on another machine";
  return "";
}

}  // namespace

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::string path_key(const fs::path& folder) {
  std::error_code error;
  const fs::path canonical = fs::weakly_canonical(fs::absolute(folder, error), error);
  const std::string key = (canonical.has_filename() ? canonical : canonical.parent_path()).string();
  return key.empty() ? folder.string() : key;
}

RatesFile::RatesFile() : path_(user_cache_path("rates.json")) {}

Rates RatesFile::load() const {
  std::error_code ignored;
  if (path_.empty() || !fs::exists(path_, ignored)) return {};
  std::string why;
  try {
    if (fs::file_size(path_) > kMostBytes) throw std::runtime_error("it is too long");  // and nobody waits for a pipe
    std::ifstream file(path_, std::ios::binary);
    const Json json = Json::parse(file);
    why = why_foreign(json);
    if (why.empty()) return rates_from(json);
  } catch (const std::exception& error) {
    why = "it is broken: " + std::string(error.what());
  }
  log_once("rates " + path_.string() + why, LogLevel::warning,
           "rates in " + path_.string() + " are ignored: " + why + " (terrace inspect --probe replaces it)");
  return {};
}

void RatesFile::save(const Rates& rates) const {
  if (path_.empty()) {
    log(LogLevel::warning, "the rates are not kept: neither XDG_CACHE_HOME nor HOME names a folder");
    return;
  }
  Json json;
  json["version"] = kVersion;
  json["machine"] = this_machine();
  json.update(json_of(rates));
  keep_in_cache(path_, text_of(json) + "\n", "the rates are");
}

std::string to_json(const Rates& rates) { return text_of(json_of(rates)); }

}  // namespace terrace
