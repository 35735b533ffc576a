#include "tools/dataset.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <xxhash.h>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kProbe = 4096;  // bytes looked at to tell text from the rest
constexpr double kHeldOut = 0.05;
constexpr std::uint64_t kShuffleSeed = 0x7e22ace;  // fixed, so that every run holds out the same bytes

[[noreturn]] void refuse(const fs::path& path, const std::string& why, const std::string& hint) {
  throw ConfigError("data: " + path.string() + ": " + why, hint);
}

[[noreturn]] void refuse_unreadable(const fs::path& path) {
  refuse(path, "cannot be read: " + std::generic_category().message(errno), "make it readable, or leave it out");
}

struct CloseFile {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};

std::unique_ptr<std::FILE, CloseFile> open(const fs::path& path) {
  std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
  if (!file) refuse_unreadable(path);
  return file;
}

bool looks_like_text(const fs::path& path) {
  const auto file = open(path);
  std::array<char, kProbe> probe;
  const std::size_t got = std::fread(probe.data(), 1, probe.size(), file.get());
  if (std::ferror(file.get()) != 0) refuse_unreadable(path);
  return std::find(probe.begin(), probe.begin() + got, '\0') == probe.begin() + got;
}

/// Appends what is in the file, `most` bytes at most.
void append(const fs::path& path, std::uint64_t most, std::vector<std::uint8_t>& bytes) {
  const auto file = open(path);
  std::array<std::uint8_t, 64 << 10> block;
  while (most > 0) {
    const std::size_t got = std::fread(block.data(), 1, std::min<std::uint64_t>(block.size(), most), file.get());
    if (std::ferror(file.get()) != 0) refuse_unreadable(path);
    if (got == 0) break;
    bytes.insert(bytes.end(), block.begin(), block.begin() + got);
    most -= got;
  }
}

struct File {
  fs::path path;
  std::uint64_t size;
};

/// The text files in a folder, sorted by where they are in it, so that it does not matter where the folder is.
std::vector<fs::path> texts_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code dangling;
    if (!entry->is_regular_file(dangling) || !looks_like_text(entry->path())) continue;
    found.push_back(entry->path().lexically_relative(folder));
  }
  if (error) refuse(folder, "cannot be listed: " + error.message(), "make it readable, or name its files one by one");
  std::sort(found.begin(), found.end());
  for (fs::path& path : found) path = folder / path;
  return found;
}

std::vector<File> list_files(const std::vector<fs::path>& paths) {
  if (paths.empty()) throw ConfigError("data: no path was given", "name text files or folders: --data PATH...");
  std::vector<File> files;
  std::set<fs::path> seen;  // a file named twice would be learnt and held out
  const auto add = [&](const fs::path& path) {
    std::error_code error;
    if (!seen.insert(fs::canonical(path, error)).second) return;
    const std::uintmax_t size = fs::file_size(path, error);
    files.push_back({path, error ? 0 : size});
  };
  for (const fs::path& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::not_found) {
      refuse(path, "no such file or folder", "give existing text files or folders: --data PATH...");
    }
    if (error) refuse(path, error.message(), "give text files or folders that can be read");
    if (fs::is_directory(status)) {
      for (const fs::path& file : texts_in(path)) add(file);
    } else if (fs::is_regular_file(status)) {
      add(path);
    } else {
      refuse(path, "is neither a file nor a folder", "give text files or folders");
    }
  }
  return files;
}

/// The same order on every machine: the standard leaves std::shuffle's to the library.
void shuffle(std::vector<File>& files) {
  std::mt19937_64 generator(kShuffleSeed);
  for (std::size_t rest = files.size(); rest > 1; --rest) std::swap(files[rest - 1], files[generator() % rest]);
}

std::string names_of(const std::vector<fs::path>& paths) {
  std::string names = paths.front().string();
  if (paths.size() > 1) names += " and " + std::to_string(paths.size() - 1) + " more";
  return names;
}

}  // namespace

Dataset::Dataset(const std::vector<fs::path>& paths, std::int64_t sequence, std::uint64_t most_bytes)
    : sequence_(sequence) {
  std::vector<File> files = list_files(paths);
  shuffle(files);
  std::uint64_t listed = 0;
  for (const File& file : files) listed += file.size;
  bytes_.reserve(std::min(listed, most_bytes));  // growing step by step would take up to three times the bytes
  for (const File& file : files) append(file.path, most_bytes - bytes_.size(), bytes_);
  if (listed > most_bytes) {
    log(LogLevel::warning, "data: reading " + format_bytes(most_bytes) + " of " + format_bytes(listed) + " in " +
                               std::to_string(files.size()) + " files, picked at random: that is the most it reads");
  }

  const std::size_t window = static_cast<std::size_t>(sequence) + 1;  // a sequence and the token after it
  if (bytes_.size() < 2 * window) {
    const std::string what = bytes_.empty()
                                 ? "there is no text to learn"
                                 : "has " + std::to_string(bytes_.size()) + " bytes of text; a sequence of " +
                                       std::to_string(sequence) + " tokens to learn and " +
                                       "another to hold out need " + std::to_string(2 * window);
    refuse(
        names_of(paths), what,
        bytes_.empty() ? "give files or folders with text: --data PATH..." : "give more text, or lower model.sequence");
  }
  const auto share = static_cast<std::size_t>(static_cast<double>(bytes_.size()) * kHeldOut);
  training_bytes_ = bytes_.size() - std::max(share, window);
}

std::uint64_t Dataset::digest() const { return XXH3_64bits(bytes_.data(), bytes_.size()); }

Batch Dataset::training_batch(std::mt19937_64& generator, std::int64_t sequences) const {
  // The remainder is biased by less than 2^-30: not worth a distribution whose results differ between libraries.
  const std::size_t choices = training_bytes_ - static_cast<std::size_t>(sequence_);
  std::vector<std::size_t> begins(static_cast<std::size_t>(sequences));
  for (std::size_t& begin : begins) begin = generator() % choices;
  return batch(training(), begins);
}

std::int64_t Dataset::held_out_sequences() const {
  return static_cast<std::int64_t>(held_out().size() - 1) / sequence_;
}

Batch Dataset::held_out_batch(std::int64_t index, std::int64_t count, std::int64_t sequences) const {
  const std::int64_t all = held_out_sequences();
  const std::int64_t used = count * sequences;
  if (index < 0 || index >= count || used > all) throw LogicError("held-out batch beyond the held-out bytes");
  std::vector<std::size_t> begins(static_cast<std::size_t>(sequences));
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t which = (index * sequences + i) * all / used;
    begins[static_cast<std::size_t>(i)] = static_cast<std::size_t>(which * sequence_);
  }
  return batch(held_out(), begins);
}

Batch Dataset::batch(std::span<const std::uint8_t> bytes, const std::vector<std::size_t>& begins) const {
  const auto sequences = static_cast<std::int64_t>(begins.size());
  Batch made{at::empty({sequences, sequence_}, at::kLong), at::empty({sequences, sequence_}, at::kLong)};
  auto* tokens = made.tokens.mutable_data_ptr<std::int64_t>();
  auto* targets = made.targets.mutable_data_ptr<std::int64_t>();
  for (const std::size_t begin : begins) {
    const auto window = bytes.subspan(begin, static_cast<std::size_t>(sequence_) + 1);
    tokens = std::copy(window.begin(), window.end() - 1, tokens);
    targets = std::copy(window.begin() + 1, window.end(), targets);
  }
  return made;
}

void ByteCounts::add(const at::Tensor& tokens) {
  const at::Tensor flat = tokens.contiguous();
  const auto* values = flat.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < flat.numel(); ++i) ++counts_.at(static_cast<std::size_t>(values[i]));
}

double ByteCounts::entropy() const {
  double total = 0;
  for (const std::uint64_t count : counts_) total += static_cast<double>(count);
  double nats = 0;
  for (const std::uint64_t count : counts_) {
    if (count > 0) nats -= static_cast<double>(count) / total * std::log(static_cast<double>(count) / total);
  }
  return nats;
}

}  // namespace terrace
