#include "integration/checkpoint_folder.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

namespace terrace {

std::vector<std::string> CheckpointFolder::names() const {
  return files_.list(path_).value_or(std::vector<std::string>());
}

std::optional<std::string> CheckpointFolder::manifest_text() const {
  const std::optional<CheckpointFile> file = files_.open(manifest_path());
  if (!file) return std::nullopt;
  std::string text(files_.size(*file), '\0');
  text.resize(files_.read(*file, 0, std::as_writable_bytes(std::span(text))));
  if (!looks_like_a_manifest(text)) {
    // Nothing of it may be left; then its data tell whose it was.
    const std::vector<std::string> all = names();
    if (std::none_of(all.begin(), all.end(), is_data_file_name)) {
      throw ConfigError("checkpoint: " + manifest_path().string() + " is not the manifest of a checkpoint of Terrace",
                        "choose another folder");
    }
  }
  return text;
}

std::optional<CheckpointManifest> CheckpointFolder::manifest() const {
  const std::optional<std::string> text = manifest_text();
  return text ? std::optional(parse_manifest(*text, manifest_path())) : std::nullopt;
}

void CheckpointFolder::require_own() const {
  for (const std::string& name : names()) {
    const bool is_own = is_data_file_name(name) || name == lock_path().filename() ||
                        name == manifest_path().filename() || name == next_manifest_path().filename();
    if (!is_own) {
      throw ConfigError("checkpoint: " + path_.string() + " holds '" + name + "', which is no part of a checkpoint",
                        "choose an empty folder, or one that does not exist yet");
    }
  }
  try {
    manifest();
  } catch (const CorruptData&) {
    // A checkpoint that cannot be loaded may be replaced.
  }
}

void CheckpointFolder::remove_leftovers() const {
  files_.sync_folder(path_);  // a manifest that did not last would name what is removed
  std::optional<CheckpointManifest> kept;
  bool is_known = true;
  try {
    kept = manifest();
  } catch (const CorruptData&) {
    is_known = false;
  }
  for (const std::string& name : names()) {
    const bool is_unnamed = is_data_file_name(name) && is_known && !(kept && kept->data_file == name);
    if (!is_unnamed && name != next_manifest_path().filename()) continue;
    try {
      files_.remove(path_ / name);
    } catch (const IoError& error) {
      log(LogLevel::warning, error.what());
    }
  }
}

}  // namespace terrace
