#include "integration/model_notes.h"

#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/log.h"
#include "integration/checkpoint_checksum.h"
#include "integration/user_cache.h"

namespace terrace {
namespace {

using Json = nlohmann::json;

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 2;
/// What notes take at most, and each parameter besides.
constexpr std::uintmax_t kMostBytes = 4096;
constexpr std::uintmax_t kMostBytesAParameter = 12;
/// So that sums of what notes tell are sums.
constexpr std::uint64_t kMostOperands = std::uint64_t{1} << 20U;
constexpr std::uint64_t kMostDeviceBytes = std::uint64_t{1} << 56U;

std::string key_of(std::span<const ManagedParameter> model) {
  std::string text;
  for (const ManagedParameter& parameter : model) {
    text += parameter.name + '\n' + std::to_string(static_cast<int>(parameter.tensor.scalar_type()));
    for (const std::int64_t size : parameter.tensor.sizes()) text += ' ' + std::to_string(size);
    text += '\n';
  }
  return to_hex(checksum_of(text));
}

/// Empty, or each position of so many once. Throws std::exception where it is something else.
std::vector<std::uint32_t> order_from(const Json& json, std::size_t parameters) {
  std::vector<bool> seen(parameters, false);
  std::vector<std::uint32_t> order;
  for (const Json& each : json.get_ref<const Json::array_t&>()) {
    const bool is_position = each.is_number_unsigned() && each.get<std::uint64_t>() < parameters;
    if (!is_position || seen[each.get<std::size_t>()]) throw std::runtime_error("its order is of another model");
    seen[each.get<std::size_t>()] = true;
    order.push_back(each.get<std::uint32_t>());
  }
  if (!order.empty() && order.size() != parameters) throw std::runtime_error("its order is of another model");
  return order;
}

/// Throws std::exception where they are none.
ModelNotes notes_from(const std::filesystem::path& path, std::size_t parameters) {
  if (std::filesystem::file_size(path) > kMostBytes + parameters * kMostBytesAParameter) {
    throw std::runtime_error("it is too long");
  }
  std::ifstream file(path, std::ios::binary);
  const Json json = Json::parse(file);
  if (json.at("version") != kVersion) throw std::runtime_error("it is of another version");
  ModelNotes notes{.gradients_read_once = json.at("gradients_read_once").get<bool>(),
                   .forward_seconds = json.at("forward_seconds").get<double>(),
                   .backward_seconds = json.at("backward_seconds").get<double>(),
                   .order = order_from(json.at("order"), parameters),
                   .device_bytes = json.at("device_bytes").get<std::uint64_t>(),
                   .most_operands = json.at("most_operands").get<std::uint64_t>()};
  if (notes.most_operands > kMostOperands || notes.device_bytes > kMostDeviceBytes || !(notes.forward_seconds >= 0) ||
      !(notes.backward_seconds >= 0)) {
    throw std::runtime_error("no run has needed that");
  }
  return notes;
}

}  // namespace

ModelNotesFile::ModelNotesFile(std::span<const ManagedParameter> model)
    : path_(user_cache_path("models/" + key_of(model) + ".json")), parameters_(model.size()) {}

std::optional<ModelNotes> ModelNotesFile::load() const {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path_, ignored)) return std::nullopt;
  try {
    return notes_from(path_, parameters_);
  } catch (const std::exception& error) {
    std::filesystem::remove(path_, ignored);
    log(LogLevel::warning, "what was learned of the model, in " + path_.string() + ", is of no use: " + error.what());
    return std::nullopt;
  }
}

void ModelNotesFile::save(const ModelNotes& notes) const {
  if (path_.empty()) return;
  const Json json{{"version", kVersion},
                  {"gradients_read_once", notes.gradients_read_once},
                  {"forward_seconds", notes.forward_seconds},
                  {"backward_seconds", notes.backward_seconds},
                  {"order", notes.order},
                  {"device_bytes", notes.device_bytes},
                  {"most_operands", notes.most_operands}};
  if (keep_in_cache(path_, json.dump() + "\n", "what was learned of the model is")) {
    log(LogLevel::info, "the next run places this model by what was learned of it (kept in " + path_.string() + ")");
  }
}

}  // namespace terrace
