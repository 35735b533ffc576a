#include "integration/model_notes.h"

#include <fstream>
#include <istream>
#include <stdexcept>
#include <string>
#include <system_error>

#include <nlohmann/json.hpp>

#include "base/log.h"
#include "integration/checkpoint_checksum.h"
#include "integration/user_cache.h"

namespace terrace {
namespace {

using Json = nlohmann::json;

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 1;
constexpr std::size_t kMostBytes = 4096;

std::string key_of(std::span<const ManagedParameter> model) {
  std::string text;
  for (const ManagedParameter& parameter : model) {
    text += parameter.name + '\n' + std::to_string(static_cast<int>(parameter.tensor.scalar_type()));
    for (const std::int64_t size : parameter.tensor.sizes()) text += ' ' + std::to_string(size);
    text += '\n';
  }
  return to_hex(checksum_of(text));
}

/// Throws std::exception where they are none.
ModelNotes notes_from(std::istream& file) {
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof()) throw std::runtime_error("it is too long");
  text.resize(static_cast<std::size_t>(file.gcount()));
  const Json json = Json::parse(text);
  if (json.at("version") != kVersion) throw std::runtime_error("it is of another version");
  return {.gradients_read_once = json.at("gradients_read_once").get<bool>()};
}

}  // namespace

ModelNotesFile::ModelNotesFile(std::span<const ManagedParameter> model)
    : path_(user_cache_path("models/" + key_of(model) + ".json")) {}

std::optional<ModelNotes> ModelNotesFile::load() const {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path_, ignored)) return std::nullopt;
  std::ifstream file(path_, std::ios::binary);
  if (!file) return std::nullopt;
  try {
    return notes_from(file);
  } catch (const std::exception& error) {
    std::filesystem::remove(path_, ignored);
    log(LogLevel::warning, "what was learned of the model, in " + path_.string() + ", is of no use: " + error.what());
    return std::nullopt;
  }
}

void ModelNotesFile::save(const ModelNotes& notes) const {
  if (path_.empty()) return;
  const Json json{{"version", kVersion}, {"gradients_read_once", notes.gradients_read_once}};
  if (const int error_number = replace_file(path_, json.dump() + "\n"); error_number != 0) {
    log(LogLevel::warning, "what was learned of the model is not kept: writing " + path_.string() +
                               " failed: " + std::generic_category().message(error_number));
    return;
  }
  log(LogLevel::info, "the next run places this model by what was learned of it (kept in " + path_.string() + ")");
}

}  // namespace terrace
