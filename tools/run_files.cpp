#include "tools/run_files.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "integration/checkpoint_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

struct File {
  std::string_view option;
  fs::path path;
};

constexpr const char* config_name = "config.toml";

std::vector<File> written_by(const TrainOptions& options) {
  std::vector<File> files;
  if (!options.metrics.empty()) files.push_back({"--metrics", options.metrics});
  if (!options.timeline.empty()) files.push_back({"--timeline", options.timeline});
  if (!options.output.empty()) {
    for (const char* name : {config_name, "metrics.jsonl", "report.json", "sample.txt"}) {
      files.push_back({"--output", options.output / name});
    }
  }
  return files;
}

std::vector<File> read_by(const TrainOptions& options) {
  std::vector<File> files;
  if (!options.config_file.empty()) files.push_back({"--config", options.config_file});
  for (const auto& path : options.config.data.paths) files.push_back({"--data", path});
  return files;
}

/// Where a file is, or would be: links followed, and the folders that are not there yet as they are written. Empty
/// where that cannot be found out.
fs::path place_of(fs::path path) {
  constexpr int most_links = 40;
  std::error_code error;
  path = fs::absolute(path, error);
  for (int links = 0; links < most_links && fs::is_symlink(path, error); ++links) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  path = fs::weakly_canonical(path, error);
  return error ? fs::path() : path;
}

bool are_the_same(const File& one, const File& other) {
  std::error_code error;
  if (fs::is_other(one.path, error)) return false;
  const fs::path place = place_of(one.path);
  return (!place.empty() && place == place_of(other.path)) || fs::equivalent(one.path, other.path, error);
}

/// Whether the file is a text in that folder, and begins as nothing that a run writes.
bool is_text_within(const File& file, const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error) || !fs::is_regular_file(file.path, error)) return false;
  const fs::path place = place_of(file.path);
  const fs::path within = place_of(folder);
  const bool is_within =
      !within.empty() && std::mismatch(within.begin(), within.end(), place.begin(), place.end()).first == within.end();
  const bool is_of_a_run = place.filename() == config_name || place.filename() == "sample.txt" ||
                           std::ifstream(file.path, std::ios::binary).peek() == '{';
  return is_within && !is_of_a_run && fs::file_size(file.path, error) > 0;
}

bool is_part_of_a_checkpoint(const File& file, const fs::path& folder) {
  const fs::path place = place_of(file.path);
  return !folder.empty() && !place.empty() && place == place_of(folder / place.filename()) &&
         CheckpointFolder::is_own(place.filename());
}

/// The files that the shell has the program write to, if any.
std::vector<File> redirections() {
  std::vector<File> files{{"standard output", "/dev/stdout"}, {"standard error", "/dev/stderr"}};
  std::error_code error;
  std::erase_if(files, [&](const File& file) { return !fs::is_regular_file(file.path, error); });
  return files;
}

[[noreturn]] void refuse(const File& written, const File& other) {
  throw ConfigError(std::string(written.option) + " would overwrite " + written.path.string() + ", which is for " +
                        std::string(other.option),
                    "give each a file of its own");
}

}  // namespace

void require_files_of_their_own(const TrainOptions& options) {
  const std::vector<File> written = written_by(options);
  const std::vector<File> read = read_by(options);
  const std::vector<File> printed = redirections();
  for (auto file = written.begin(); file != written.end(); ++file) {
    for (auto other = file + 1; other != written.end(); ++other) {
      if (are_the_same(*file, *other)) refuse(*file, *other);
    }
    for (const File& other : printed) {
      if (are_the_same(*file, other)) refuse(*file, other);
    }
    for (const File& folder : {File{"--save", options.save}, File{"--resume", options.resume}}) {
      if (is_part_of_a_checkpoint(*file, folder.path)) refuse(*file, folder);
    }
    for (const File& other : read) {
      const bool is_own_config =
          file->path.filename() == config_name && file->option == "--output" && other.option == "--config";
      if (!is_own_config && are_the_same(*file, other)) refuse(*file, other);
      if (other.option == "--data" && is_text_within(*file, other.path)) refuse(*file, other);
    }
  }
}

}  // namespace terrace
