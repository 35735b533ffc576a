/// Folders that are not there yet and that what follows may make.
#pragma once

#include <filesystem>
#include <system_error>
#include <unistd.h>
#include <vector>

namespace terrace {

/// Removes them at its end, those around them too, where they were made and are empty.
class MadeFolders {
 public:
  explicit MadeFolders(const std::vector<std::filesystem::path>& folders) {
    std::error_code error;
    for (const std::filesystem::path& folder : folders) {
      std::filesystem::path missing = std::filesystem::absolute(folder, error).lexically_normal();
      if (!missing.has_filename()) missing = missing.parent_path();
      for (; missing.has_relative_path() && !std::filesystem::exists(missing, error); missing = missing.parent_path()) {
        missing_.push_back(missing);
      }
    }
  }
  ~MadeFolders() {
    // Once for each: a folder that several paths lie in is empty only when the last of them has gone.
    for (std::size_t round = 0; round < missing_.size(); ++round) {
      for (const std::filesystem::path& folder : missing_) ::rmdir(folder.c_str());
    }
  }
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;

 private:
  std::vector<std::filesystem::path> missing_;
};

}  // namespace terrace
