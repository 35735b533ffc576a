#include "integration/checkpoint_manifest.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "integration/checkpoint_checksum.h"
#include "integration/optimizer_states.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;
using Kind = CheckpointRecord::Kind;

constexpr std::string_view format_name = "terrace checkpoint";
constexpr std::string_view first_words = "{\"checksum\": \"";
constexpr std::string_view after_checksum = "\",\n";
constexpr std::string_view data_prefix = "data.";
constexpr std::size_t hex_digits = 16;

constexpr std::array kinds{Kind::parameter, Kind::master, Kind::momentum,
                           Kind::variance,  Kind::buffer, Kind::generator};
constexpr std::array<std::string_view, kinds.size()> kind_names{"parameter", "master", "momentum",
                                                                "variance",  "buffer", "generator"};

constexpr std::array<std::pair<std::string_view, std::uint64_t>, 15> dtypes{{{"float32", 4},
                                                                             {"bfloat16", 2},
                                                                             {"float16", 2},
                                                                             {"float64", 8},
                                                                             {"complex64", 8},
                                                                             {"complex128", 16},
                                                                             {"int64", 8},
                                                                             {"int32", 4},
                                                                             {"int16", 2},
                                                                             {"int8", 1},
                                                                             {"uint8", 1},
                                                                             {"uint16", 2},
                                                                             {"uint32", 4},
                                                                             {"uint64", 8},
                                                                             {"bool", 1}}};

/// Why a manifest is refused; `parse_manifest` adds the file's name.
struct Refusal {
  std::string why;
};

[[noreturn]] void refuse(const std::string& why) { throw Refusal{why}; }

std::uint64_t number(const Json& json, const char* key) {
  const Json& value = json.at(key);
  if (!value.is_number_unsigned()) refuse(std::string("\"") + key + "\" is not a whole number");
  return value.get<std::uint64_t>();
}

std::int64_t signed_number(const Json& value, const char* key) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
    refuse(std::string("\"") + key + "\" is not a whole number in range");
  }
  return value.get<std::int64_t>();
}

std::vector<std::int64_t> numbers(const Json& json, const char* key) {
  const Json& list = json.at(key);
  if (!list.is_array()) refuse(std::string("\"") + key + "\" is not a list");
  std::vector<std::int64_t> result;
  for (const Json& value : list) result.push_back(signed_number(value, key));
  return result;
}

/// Bytes of a tensor, or a refusal where 64 bits do not hold them.
std::uint64_t bytes_of(const CheckpointRecord& record) {
  std::uint64_t bytes = *checkpoint_dtype_bytes(record.dtype);
  if (std::find(record.shape.begin(), record.shape.end(), 0) != record.shape.end()) return 0;
  for (const std::int64_t size : record.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) {
      refuse(describe(record) + " has a shape beyond all memory");
    }
  }
  return bytes;
}

Json to_json(const CheckpointRecord& record) {
  Json json;
  json["name"] = record.name;
  json["kind"] = name_of(record.kind);
  json["dtype"] = record.dtype;
  json["shape"] = record.shape;
  json["strides"] = record.strides;
  json["offset"] = record.offset;
  json["bytes"] = record.bytes;
  json["xxh3"] = to_hex(record.checksum);
  if (record.kind == Kind::parameter) {
    json["updates"] = record.updates;
    if (record.updates > 0) json["optimizer"] = record.updated_by;
    json["aliases"] = record.aliases;
  }
  return json;
}

CheckpointRecord record_of(const Json& json) {
  CheckpointRecord record;
  record.name = json.at("name").get<std::string>();
  const auto kind = std::find(kind_names.begin(), kind_names.end(), json.at("kind").get_ref<const std::string&>());
  if (kind == kind_names.end()) refuse("'" + record.name + "' is of an unknown kind");
  record.kind = kinds.at(static_cast<std::size_t>(kind - kind_names.begin()));
  record.dtype = json.at("dtype").get<std::string>();
  if (!checkpoint_dtype_bytes(record.dtype)) refuse(describe(record) + " is of an unknown type");
  record.shape = numbers(json, "shape");
  record.strides = numbers(json, "strides");
  record.offset = number(json, "offset");
  record.bytes = number(json, "bytes");
  const auto checksum = from_hex(json.at("xxh3").get_ref<const std::string&>());
  if (!checksum) refuse(describe(record) + " has no checksum");
  record.checksum = *checksum;
  if (record.kind == Kind::parameter) {
    record.updates = signed_number(json.at("updates"), "updates");
    if (record.updates > 0) record.updated_by = json.value("optimizer", std::string(adamw_name));
    record.aliases = json.at("aliases").get<std::vector<std::string>>();
  }
  if (record.strides.size() != record.shape.size()) refuse(describe(record) + " has more or fewer strides than sizes");
  if (record.bytes != bytes_of(record)) refuse(describe(record) + " is not as large as its type and shape say");
  return record;
}

/// Where a record begins that follows one which ends at `end`.
void require_laid_out(const CheckpointManifest& manifest) {
  std::uint64_t end = 0;
  for (const CheckpointRecord& record : manifest.records) {
    // The first sum cannot pass 64 bits: `end` is below data_bytes at each turn, and that is checked first.
    const std::uint64_t begin = (end + checkpoint_alignment - 1) / checkpoint_alignment * checkpoint_alignment;
    if (record.offset != begin || begin > manifest.data_bytes || record.bytes > manifest.data_bytes - begin) {
      refuse(describe(record) + " does not follow the record before it");
    }
    end = begin + record.bytes;
  }
  if (end != manifest.data_bytes) refuse("its records are not as large as its data file");
}

/// A master is whole, or the lower half beside a parameter of two bytes.
bool is_type_of_state(Kind kind, std::string_view dtype) {
  return dtype == "float32" || dtype == (kind == Kind::master ? "uint16" : "bfloat16");
}

void require_whole(const CheckpointManifest& manifest) {
  std::map<std::string_view, std::map<Kind, const CheckpointRecord*>> by_name;
  for (const CheckpointRecord& record : manifest.records) {
    if (!by_name[record.name].emplace(record.kind, &record).second) refuse(describe(record) + " comes twice");
  }
  for (const auto& [name, records] : by_name) {
    const auto parameter = records.find(Kind::parameter);
    const bool is_parameter = parameter != records.end();
    const bool is_updated = is_parameter && parameter->second->updates > 0;
    if (is_updated && !is_optimizer(parameter->second->updated_by)) {
      refuse("'" + std::string(name) + "' was updated by an unknown optimizer");
    }
    for (const Kind kind : {Kind::master, Kind::momentum, Kind::variance}) {
      const auto state = records.find(kind);
      const bool is_expected = is_updated && (kind != Kind::master || parameter->second->dtype != "float32") &&
                               (kind != Kind::variance || keeps_variance(parameter->second->updated_by));
      if ((state != records.end()) != is_expected) {
        refuse(std::string(name_of(kind)) + " of '" + std::string(name) + "' is " +
               (is_expected ? "missing" : "of no parameter that has one"));
      }
      if (is_expected &&
          (!is_type_of_state(kind, state->second->dtype) || state->second->shape != parameter->second->shape)) {
        refuse(describe(*state->second) + " does not go with its parameter");
      }
    }
  }
}

CheckpointManifest manifest_of(const Json& json) {
  CheckpointManifest manifest;
  manifest.data_file = json.at("data").get<std::string>();
  if (!is_data_file_name(manifest.data_file)) refuse("it names no data file");
  manifest.data_bytes = number(json, "bytes");
  if (manifest.data_bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    refuse("its data file is larger than any file");
  }
  for (const Json& record : json.at("records")) manifest.records.push_back(record_of(record));
  manifest.notes = json.at("notes").get<CheckpointNotes>();
  require_laid_out(manifest);
  require_whole(manifest);
  return manifest;
}

std::string dumped(const Json& json) {
  try {
    return json.dump(1);
  } catch (const Json::type_error& error) {
    throw ConfigError(std::string("checkpoint: a name or a note is not UTF-8 text: ") + error.what(),
                      "encode what is not text, for example in hexadecimal");
  }
}

/// Of all after the first line.
void require_checksum(const std::string& text) {
  const std::size_t head = first_words.size() + hex_digits + after_checksum.size();
  if (!text.starts_with(first_words) || text.size() < head ||
      std::string_view(text).substr(head - after_checksum.size(), after_checksum.size()) != after_checksum) {
    refuse("it does not begin with its checksum");
  }
  const std::string_view rest = std::string_view(text).substr(head);
  const auto checksum = from_hex(std::string_view(text).substr(first_words.size(), hex_digits));
  if (!checksum || *checksum != checksum_of(rest)) refuse("its checksum is wrong");
}

}  // namespace

std::string_view name_of(Kind kind) noexcept { return kind_names[static_cast<std::size_t>(kind)]; }

std::string describe(const CheckpointRecord& record) {
  return std::string(name_of(record.kind)) + " of '" + record.name + "'";
}

std::optional<std::uint64_t> checkpoint_dtype_bytes(std::string_view dtype) noexcept {
  for (const auto& [name, bytes] : dtypes) {
    if (name == dtype) return bytes;
  }
  return std::nullopt;
}

void require_notes(const CheckpointNotes& notes) {
  std::uint64_t bytes = 0;
  for (const auto& [name, text] : notes) {
    bytes += name.size() + text.size();
  }
  if (bytes > checkpoint_notes_most_bytes) {
    throw ConfigError("checkpoint: its notes have " + std::to_string(bytes) + " B, and may have " +
                          std::to_string(checkpoint_notes_most_bytes),
                      "keep large data in a file of your own, and its name in a note");
  }
  dumped(notes);
}

std::string to_text(const CheckpointManifest& manifest) {
  Json json;
  json["format"] = format_name;
  json["version"] = checkpoint_version;
  json["data"] = manifest.data_file;
  json["bytes"] = manifest.data_bytes;
  json["notes"] = manifest.notes;
  json["records"] = Json::array();
  for (const CheckpointRecord& record : manifest.records) json["records"].push_back(to_json(record));
  std::string body = dumped(json);
  body.erase(0, 2);  // the brace, which comes before the checksum, and the end of its line
  std::string text(first_words);
  text.append(to_hex(checksum_of(body))).append(after_checksum).append(body);
  return text;
}

CheckpointManifest parse_manifest(const std::string& text, const std::filesystem::path& file) {
  const auto corrupt = [&](const std::string& why) {
    return CorruptData("checkpoint: " + file.string() + " is corrupt: " + why,
                       "load another checkpoint, or restore the folder from a copy");
  };
  try {
    require_checksum(text);
    const Json json = Json::parse(text);
    if (json.at("format").get_ref<const std::string&>() != format_name) refuse("it is of another format");
    if (const std::uint64_t version = number(json, "version"); version == 0 || version > checkpoint_version) {
      throw ConfigError("checkpoint: " + file.string() + " has version " + std::to_string(version) +
                            "; this program knows up to version " + std::to_string(checkpoint_version),
                        "use the program that saved it, or one as new");
    }
    return manifest_of(json);
  } catch (const Refusal& refusal) {
    throw corrupt(refusal.why);
  } catch (const Json::exception& error) {
    throw corrupt(error.what());
  }
}

bool looks_like_a_manifest(std::string_view text) noexcept {
  return text.starts_with(first_words) || text.find(format_name) != std::string_view::npos;
}

bool is_data_file_name(std::string_view name) noexcept {
  return name.size() == data_prefix.size() + hex_digits && name.starts_with(data_prefix) &&
         name.find_first_not_of("0123456789abcdef", data_prefix.size()) == std::string_view::npos;
}

}  // namespace terrace
