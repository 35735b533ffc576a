#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <sys/types.h>
#include <vector>

#include "offload/dead_extent_file.h"
#include "offload/extent_format.h"
#include "offload/io_engine.h"

namespace terrace {

/// One file of an NVMe store: `extent_count` extents of `extent_bytes` each, as extent_format.h says.
///
/// It is named terrace-<pid>-<n>.extents, created new, locked (flock) for as long as this object lives, and removed by
/// the destructor, which never throws; a forked child that destroys its copy leaves the file alone. Its size is
/// `capacity_bytes()` from the start; space on the disk is taken as it is reserved. Where the file system can, it is
/// read and written directly, past the page cache: then offsets, lengths and memory are multiples of 4096 B. The header
/// is written only once the lock is held, so a file with our header and without a lock was left by a dead process,
/// however the two were interleaved. Constructor and `reserve_space` throw IoError with path, cause and a hint.
/// Thread-safe, for different extents.
class ExtentFile {
 public:
  ExtentFile(const std::filesystem::path& folder, std::size_t extent_bytes, std::uint64_t extent_count);
  ~ExtentFile();
  ExtentFile(const ExtentFile&) = delete;
  ExtentFile& operator=(const ExtentFile&) = delete;

  const IoFile& file() const noexcept { return file_; }
  /// Takes its name away, unless another file has it now or this is a forked copy. What cannot be removed is logged.
  void remove() noexcept;
  std::uint64_t capacity_bytes() const noexcept { return extent_file_bytes(extent_bytes_, extent_count_); }
  std::uint64_t offset_of(std::uint64_t extent) const noexcept {
    return ExtentFileHeader::kBytes + extent * extent_bytes_;
  }

  /// Records what a run of extents holds from now on; their own checksums are filled in. It outlives the process,
  /// whatever ends that.
  void record(std::uint64_t first_extent, std::span<ExtentRecord> records);
  /// Of a run of extents: they hold nothing.
  void clear_records(std::uint64_t first_extent, std::uint64_t count);

  /// Whether transfers go past the page cache.
  bool direct() const noexcept { return direct_; }

  /// Has the file system set space aside for a run of extents.
  void reserve_space(std::uint64_t first_extent, std::uint64_t count);
  /// False once the file system turned out unable to: a full disk then shows at the write.
  bool space_is_guaranteed() const noexcept { return space_is_guaranteed_.load(std::memory_order_relaxed); }

 private:
  ExtentFile();
  void create_in(const std::filesystem::path& folder);
  void open_for_transfers();
  bool go_direct();
  void lock();
  void make_room_for_records();
  void write_header();

  IoFile bookkeeping_;  ///< the same file, by the page cache: its header and records
  IoFile file_;
  pid_t owner_;
  std::uint64_t extent_bytes_ = 0;
  std::uint64_t extent_count_ = 0;
  bool direct_ = false;
  std::atomic<bool> space_is_guaranteed_{true};
};

/// Removes the extent files that dead processes left in a folder and returns their paths. Left alone: files of live
/// stores, files with other content or of another version whatever their name, and what cannot be opened or removed.
/// Throws IoError if the folder cannot be listed.
std::vector<std::filesystem::path> remove_dead_extent_files(const std::filesystem::path& folder, Patience& patience);
std::vector<std::filesystem::path> remove_dead_extent_files(const std::filesystem::path& folder);

/// Disk space that `remove_dead_extent_files` would free; 0 if the folder does not exist.
std::uint64_t dead_extent_file_bytes(const std::filesystem::path& folder, Patience& patience);
std::uint64_t dead_extent_file_bytes(const std::filesystem::path& folder);

}  // namespace terrace
