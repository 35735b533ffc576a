#include "tools/run_files.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"

namespace terrace {
namespace {

struct File {
  const char* option;
  std::filesystem::path path;
};

std::vector<File> written_by(const TrainOptions& options) {
  std::vector<File> files;
  if (!options.metrics.empty()) files.push_back({"--metrics", options.metrics});
  if (!options.timeline.empty()) files.push_back({"--timeline", options.timeline});
  if (!options.output.empty()) {
    for (const char* name : {"metrics.jsonl", "report.json", "sample.txt"}) {
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

bool are_the_same(const File& one, const File& other) {
  std::error_code error;
  if (std::filesystem::is_other(one.path, error)) return false;
  return std::filesystem::weakly_canonical(one.path, error) == std::filesystem::weakly_canonical(other.path, error) ||
         std::filesystem::equivalent(one.path, other.path, error);
}

void require_differ(const File& written, const File& other) {
  if (!are_the_same(written, other)) return;
  throw ConfigError(
      std::string(written.option) + " would overwrite " + other.path.string() + ", which is for " + other.option,
      "give each a file of its own");
}

}  // namespace

void require_files_of_their_own(const TrainOptions& options) {
  const std::vector<File> written = written_by(options);
  const std::vector<File> read = read_by(options);
  for (auto file = written.begin(); file != written.end(); ++file) {
    std::for_each(file + 1, written.end(), [&](const File& other) { require_differ(*file, other); });
    std::for_each(read.begin(), read.end(), [&](const File& other) { require_differ(*file, other); });
  }
}

}  // namespace terrace
