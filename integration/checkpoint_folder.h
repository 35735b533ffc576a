/// A checkpoint's folder: which files are its own, and which of them count.
///
/// It holds `manifest.json`, which names the one data file that counts; `lock`, which whoever saves holds; and what a
/// save that was cut short has left, which the next one removes. A folder with anything else in it is refused, so that
/// nothing is ever removed that Terrace has not written.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "integration/checkpoint_files.h"
#include "integration/checkpoint_manifest.h"

namespace terrace {

class CheckpointFolder {
 public:
  /// `files` outlives it. Touches nothing.
  CheckpointFolder(CheckpointFiles& files, std::filesystem::path path) : files_(files), path_(std::move(path)) {}

  CheckpointFiles& files() const noexcept { return files_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  std::filesystem::path lock_path() const { return path_ / "lock"; }
  std::filesystem::path manifest_path() const { return path_ / "manifest.json"; }
  /// Where the next manifest is written before it takes the place of the one before.
  std::filesystem::path next_manifest_path() const { return path_ / "manifest.json.tmp"; }

  /// The manifest's text; nothing if there is none. Throws ConfigError if it is not a checkpoint's.
  std::optional<std::string> manifest_text() const;
  /// The manifest; nothing if there is none. Throws as `manifest_text` and `parse_manifest`.
  std::optional<CheckpointManifest> manifest() const;

  /// Throws ConfigError, naming what is in the way, if the folder cannot be one of a checkpoint that this program
  /// saves. A folder that is missing can.
  void require_own() const;
  /// Removes what the manifest does not name, once the manifest is sure to last. Where it cannot be read, no data file
  /// is. What cannot be removed is logged: the next save tries again.
  void remove_leftovers() const;

 private:
  std::vector<std::string> names() const;

  CheckpointFiles& files_;
  std::filesystem::path path_;
};

}  // namespace terrace
