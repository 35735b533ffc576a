#include "integration/checkpoint_folder.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

namespace terrace {

CheckpointFolder::CheckpointFolder(CheckpointFiles& files, std::filesystem::path path)
    : files_(files), path_(std::move(path)) {
  if (path_.empty()) {
    throw ConfigError("checkpoint: the name of its folder is empty", "name a folder, and check variables in the name");
  }
}

std::vector<std::string> CheckpointFolder::names() const {
  return files_.list(path_).value_or(std::vector<std::string>());
}

std::optional<std::string> CheckpointFolder::manifest_text() const {
  const std::optional<CheckpointFile> file = files_.open(manifest_path());
  if (!file) return std::nullopt;
  const std::uint64_t bytes = files_.size(*file);
  if (bytes > checkpoint_manifest_most_bytes) {
    throw CorruptData("checkpoint: " + manifest_path().string() + " is corrupt: it has " + std::to_string(bytes) +
                          " B, more than any manifest",
                      "load another checkpoint, or restore the folder from a copy");
  }
  std::string text(bytes, '\0');
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

bool CheckpointFolder::is_own(const std::filesystem::path& name) {
  return name == lock || name == the_manifest || name == next_manifest || is_data_file_name(name.string());
}

std::optional<CheckpointManifest> CheckpointFolder::manifest() const {
  const std::optional<std::string> text = manifest_text();
  return text ? std::optional(parse_manifest(*text, manifest_path())) : std::nullopt;
}

void CheckpointFolder::require_own() const {
  try {
    if (manifest_text()) return;
  } catch (const CorruptData&) {
    return;  // a checkpoint that cannot be loaded may be replaced
  }
  for (const std::string& name : names()) {
    if (!is_own(name)) {
      throw ConfigError("checkpoint: " + path_.string() + " holds '" + name + "', which is no part of a checkpoint",
                        "choose an empty folder, or one that does not exist yet");
    }
  }
}

void CheckpointFolder::remove_leftovers() const {
  files_.sync_folder(path_);  // a manifest that did not last would name what is removed
  std::optional<CheckpointManifest> kept;
  try {
    kept = manifest();
  } catch (const CorruptData&) {
    remove(next_manifest_path().filename());
    return;
  }
  remove_all_but(kept ? kept->data_file : "");
}

void CheckpointFolder::remove_all_but(std::string_view data_file) const noexcept {
  try {
    for (const std::string& name : names()) {
      const bool is_left = is_data_file_name(name) ? name != data_file : name == next_manifest_path().filename();
      if (is_left) remove(name);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, error.what());
  }
}

void CheckpointFolder::remove(const std::string& name) const {
  try {
    files_.remove(path_ / name);
  } catch (const IoError& error) {
    log(LogLevel::warning, error.what());
  }
}

}  // namespace terrace
