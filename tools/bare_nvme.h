/// How long a drive takes to read and write so many bytes at once, with nothing in between: one io_uring, O_DIRECT,
/// locked buffers, 8 operations in flight each way.
///
/// The file lives in the folder as long as this object does, without a name. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

namespace terrace {

class BareNvme {
 public:
  /// Writes `most_bytes` of random bytes. Throws IoError, also where the file system has no O_DIRECT.
  BareNvme(const std::filesystem::path& folder, std::uint64_t most_bytes);
  ~BareNvme();
  BareNvme(const BareNvme&) = delete;
  BareNvme& operator=(const BareNvme&) = delete;

  /// Reads one region and writes another, each of at most `most_bytes`, whole blocks only. Throws IoError.
  double seconds(std::uint64_t read_bytes, std::uint64_t written_bytes);

 private:
  struct Ring;
  std::unique_ptr<Ring> ring_;
};

}  // namespace terrace
