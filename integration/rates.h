/// How fast this machine moves bytes, as `terrace inspect --probe` measured it, and the file that keeps it from run to
/// run. Sessions move blocks to and from NVMe as it went best there.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace terrace {

// Rates are bytes per second. `measured_at` is when, as "2026-01-31T12:00:00Z".

struct MemoryRates {
  double copy_one_core = 0;  ///< bytes copied: each is read and written
  double copy = 0;           ///< by all threads together, as the next two
  double read = 0;
  double write = 0;
  std::string measured_at;
};

/// With the smallest blocks, and the fewest of them in flight, that are hardly slower than any.
struct DriveRates {
  double read = 0;
  double write = 0;
  std::string engine;
  std::size_t block_bytes = 0;
  std::size_t depth = 0;  ///< blocks in flight, each way
  bool direct = false;    ///< past the page cache
  std::string measured_at;
};

struct LinkRates {
  double in = 0;
  double out = 0;
  std::string measured_at;
};

struct Rates {
  std::optional<MemoryRates> memory;
  std::map<std::string, DriveRates> paths;  ///< by folder, as `path_key` writes it
  std::map<std::string, LinkRates> links;   ///< by device and settings
};

/// Now, for `measured_at`.
std::string time_now();

/// One folder by one name, however it was written.
std::string path_key(const std::filesystem::path& folder);

/// JSON, of rates in bytes per second: `memory` where it was measured, `paths` and `links`.
std::string to_json(const Rates& rates);

/// The rates of one machine in one file.
class RatesFile {
 public:
  /// rates.json in the user's cache folder for Terrace: $XDG_CACHE_HOME, or else ~/.cache. Where there is neither,
  /// nothing is kept.
  RatesFile();
  explicit RatesFile(std::filesystem::path path) : path_(std::move(path)) {}

  /// What the file holds. One that is broken, of another version or of another machine is ignored, with a line in the
  /// log; where there is none, there are no rates. Never throws because of the file.
  Rates load() const;

  /// Replaces the file at once. Where it cannot be written, a warning says so, and nothing else happens.
  void save(const Rates& rates) const;

  /// Empty where nothing is kept.
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace terrace
