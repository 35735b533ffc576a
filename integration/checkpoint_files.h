/// The operations on files by which checkpoints are saved and loaded.
///
/// Each does one thing and waits for it; what fails throws IoError with what was attempted, on which path, at which
/// offset, and the cause. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/io_engine.h"

namespace terrace {

/// An open file that is closed with this.
class CheckpointFile {
 public:
  CheckpointFile() noexcept = default;
  CheckpointFile(int descriptor, std::filesystem::path path) : file_{descriptor, std::move(path)} {}
  CheckpointFile(CheckpointFile&& other) noexcept : file_(std::exchange(other.file_, {})) {}
  CheckpointFile& operator=(CheckpointFile&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~CheckpointFile();

  int descriptor() const noexcept { return file_.descriptor; }
  const std::filesystem::path& path() const noexcept { return file_.path; }

 private:
  IoFile file_;
};

class CheckpointFiles {
 public:
  CheckpointFiles() = default;
  CheckpointFiles(const CheckpointFiles&) = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;
  virtual ~CheckpointFiles() = default;

  /// Makes the folder and those that it lies in, where they are missing, to last.
  virtual void make_folder(const std::filesystem::path& folder) = 0;
  /// The names in a folder; nothing if there is no such folder.
  virtual std::optional<std::vector<std::string>> list(const std::filesystem::path& folder) = 0;
  /// Takes the lock for as long as the file is open; nothing if another process has it.
  virtual std::optional<CheckpointFile> lock(const std::filesystem::path& path) = 0;
  /// Opens a new file for writing.
  virtual CheckpointFile create(const std::filesystem::path& path) = 0;
  /// Opens a file for reading; nothing if there is none. What is no file, such as a pipe, is refused and not waited
  /// for.
  virtual std::optional<CheckpointFile> open(const std::filesystem::path& path) = 0;
  /// Whether the file at its path is still this one.
  virtual bool is_in_place(const CheckpointFile& file) = 0;
  virtual std::uint64_t size(const CheckpointFile& file) = 0;
  virtual void write(const CheckpointFile& file, std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  /// The file ends at `bytes`; what was not written up to there reads as zeros.
  virtual void resize(const CheckpointFile& file, std::uint64_t bytes) = 0;
  /// Fewer bytes than asked for are read only where the file ends.
  virtual std::size_t read(const CheckpointFile& file, std::uint64_t offset, std::span<std::byte> bytes) = 0;
  /// Returns when what was written lasts.
  virtual void sync(const CheckpointFile& file) = 0;
  /// Returns when the names in the folder last, or logs once that its file system does not say.
  virtual void sync_folder(const std::filesystem::path& folder) = 0;
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  virtual void remove(const std::filesystem::path& path) = 0;
};

/// The system's files.
std::unique_ptr<CheckpointFiles> make_system_files();

/// What checkpoints use: the system's files.
CheckpointFiles& checkpoint_files();

/// For tests of what happens when files do wrong, and for nothing else: what `checkpoint_files` gives from now on. Null
/// ends it.
void replace_checkpoint_files(CheckpointFiles* files) noexcept;

}  // namespace terrace
