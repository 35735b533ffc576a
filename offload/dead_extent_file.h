/// An extent file whose process is gone, held so that nobody else takes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "offload/extent_format.h"
#include "offload/io_engine.h"

namespace terrace {

/// For how long files are waited for whose process is gone, and whose lock is not: all together that share it. It may
/// be for ever that another process, a child of that one, has them open.
struct Patience {
  int looks_left = 1000;  ///< 5 ms apart
};

/// Not thread-safe.
class DeadExtentFile {
 public:
  /// What an extent holds: nothing that was written whole and not released since, what its record says, or neither.
  enum class Content : std::uint8_t { nothing, whole, damaged };

  struct Extent {
    Content content = Content::nothing;
    std::uint64_t sequence = 0;  ///< of the write, among all of its store, where it is whole
    std::uint64_t bytes = 0;     ///< likewise
  };

  /// Throws IoError if it cannot be opened, or its process lives: for a moment after a process was killed, the kernel
  /// still carries out its transfers, and that is waited for. Throws CorruptData if it is no extent file of this
  /// version.
  explicit DeadExtentFile(const std::filesystem::path& path);
  DeadExtentFile(const std::filesystem::path& path, Patience& patience);
  ~DeadExtentFile();
  DeadExtentFile(const DeadExtentFile&) = delete;
  DeadExtentFile& operator=(const DeadExtentFile&) = delete;

  const IoFile& file() const noexcept { return file_; }
  std::size_t extent_bytes() const noexcept { return static_cast<std::size_t>(header_.extent_bytes); }
  std::uint64_t extent_count() const noexcept { return header_.extent_count; }

  /// Reads and verifies all of them. Throws IoError.
  std::vector<Extent> survey() const;
  /// What was written into an extent that is whole. Throws IoError, and CorruptData if it is not.
  std::vector<std::byte> read(std::uint64_t extent) const;

 private:
  void take(const std::filesystem::path& path, Patience& patience);
  void open(const std::filesystem::path& path);
  void read_header();
  void lock(Patience& patience);
  ExtentRecord record_of(std::uint64_t extent) const;
  Extent look_at(std::uint64_t extent, std::vector<std::byte>& content) const;

  IoFile file_;
  ExtentFileHeader header_{};
};

}  // namespace terrace
