#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace terrace {

/// An open file and the name that messages give it. Whoever opened the descriptor closes it.
struct IoFile {
  int descriptor = -1;
  std::filesystem::path path;
};

/// Moves bytes between memory and files.
///
/// A call returns when every byte has moved: interruptions are retried and short transfers resumed, so there is no
/// partial success. Otherwise it throws IoError with path, offset, length and cause; a failed write may have changed
/// any part of its range, a failed read any part of its buffer. Offsets and lengths are bytes.
/// Thread-safe, also on one file; ranges that overlap are the caller's to order.
class IoEngine {
 public:
  virtual ~IoEngine() = default;

  virtual void read(const IoFile& file, std::uint64_t offset, std::span<std::byte> bytes) = 0;
  virtual void write(const IoFile& file, std::uint64_t offset, std::span<const std::byte> bytes) = 0;

  /// Sets aside space for a range and grows the file to hold it, so that a full disk is told here and not by a later
  /// write. False where the file system cannot do that (nothing has changed then). Throws IoError as above.
  virtual bool allocate(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes);

  virtual std::string_view name() const = 0;
};

/// pread and pwrite on the calling thread.
class PosixEngine : public IoEngine {
 public:
  void read(const IoFile& file, std::uint64_t offset, std::span<std::byte> bytes) override;
  void write(const IoFile& file, std::uint64_t offset, std::span<const std::byte> bytes) override;
  std::string_view name() const override { return "posix"; }
};

}  // namespace terrace
