/// A checkpoint's folder: which files are its own, and which of them count.
///
/// It holds `manifest.json`, which names the one data file that counts; `lock`, which whoever saves holds; and what a
/// save that was cut short has left, which the next one removes. A folder with anything else in it does not become a
/// checkpoint's; what comes into one that is stays. Nothing is ever removed that Terrace has not written.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "integration/checkpoint_files.h"
#include "integration/checkpoint_manifest.h"

namespace terrace {

class CheckpointFolder {
 public:
  /// `files` outlives it. Touches nothing. Throws ConfigError for an empty path.
  CheckpointFolder(CheckpointFiles& files, std::filesystem::path path);

  CheckpointFiles& files() const noexcept { return files_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  std::filesystem::path lock_path() const { return path_ / lock; }
  std::filesystem::path manifest_path() const { return path_ / the_manifest; }
  /// Where the next manifest is written before it takes the place of the one before.
  std::filesystem::path next_manifest_path() const { return path_ / next_manifest; }

  /// Whether a file of that name in such a folder is one of its own.
  static bool is_own(const std::filesystem::path& name);

  /// The manifest's text; nothing if there is none. Throws ConfigError if it is not a checkpoint's, and CorruptData if
  /// it is larger than any.
  std::optional<std::string> manifest_text() const;
  /// The manifest; nothing if there is none. Throws as `manifest_text` and `parse_manifest`.
  std::optional<CheckpointManifest> manifest() const;

  /// Throws ConfigError, naming what is in the way, if the folder is not a checkpoint's and cannot become one. A folder
  /// that is missing can.
  void require_own() const;
  /// Removes what saves that were cut short have left: what the manifest does not name, once it is sure to last. Where
  /// it cannot be read, no data file is. What cannot be removed is logged: the next save tries again. Throws
  /// ConfigError for a manifest of another version.
  void remove_leftovers() const;
  /// Removes all that saves have left but the manifest and this data file. What cannot be removed is logged.
  void remove_all_but(std::string_view data_file) const noexcept;

 private:
  static constexpr const char* lock = "lock";
  static constexpr const char* the_manifest = "manifest.json";
  static constexpr const char* next_manifest = "manifest.json.tmp";

  std::vector<std::string> names() const;
  void remove(const std::string& name) const;

  CheckpointFiles& files_;
  std::filesystem::path path_;
};

}  // namespace terrace
