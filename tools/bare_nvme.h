/// How long a drive takes to read and write so many bytes at once, with nothing in between: one io_uring, O_DIRECT,
/// locked buffers, a file that the ring knows, so many operations in flight each way.
///
/// A file that it makes itself lives in the folder as long as this object does, without a name. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

namespace terrace {

class BareNvme {
 public:
  /// A part of a file that there is already: the blocks that are read, then those that are written, which are
  /// overwritten unless they are written `in_place`.
  struct Part {
    std::filesystem::path file;
    std::uint64_t offset = 0;
  };

  struct Options {
    std::size_t block_bytes = std::size_t{1} << 20U;
    unsigned depth = 8;       ///< each way
    bool own_memory = false;  ///< for each block, as chunks have it; else a buffer for each operation in flight
    bool checksums = false;   ///< XXH3 of each block, before it is written and after it was read
    bool in_place = false;    ///< the blocks that are read are those that are written, with what they hold: own memory
  };

  /// Both regions have so many bytes each.
  BareNvme(const Part& part, std::uint64_t read_bytes, std::uint64_t written_bytes, const Options& options);
  /// Writes `most_bytes` of random bytes. Throws IoError, also where the file system has no O_DIRECT.
  BareNvme(const std::filesystem::path& folder, std::uint64_t most_bytes, const Options& options);
  BareNvme(const std::filesystem::path& folder, std::uint64_t most_bytes) : BareNvme(folder, most_bytes, Options{}) {}
  ~BareNvme();
  BareNvme(const BareNvme&) = delete;
  BareNvme& operator=(const BareNvme&) = delete;

  /// For what is written in place: brings what it holds. Nobody else may write there until `seconds` returns. Throws
  /// IoError.
  void load();
  /// Reads one region and writes another, each of at most `most_bytes`, whole blocks only. Throws IoError.
  double seconds(std::uint64_t read_bytes, std::uint64_t written_bytes);
  /// That `seconds` moves, of both regions together.
  std::uint64_t most_blocks() const noexcept;
  /// So far, in all. From any thread.
  std::uint64_t blocks_moved() const noexcept;
  /// Returns once it has moved so many in all, or false where it has not when told to stop. From any thread.
  bool wait_until_moved(std::uint64_t blocks, const std::stop_token& stop) const;

 private:
  struct Ring;
  std::unique_ptr<Ring> ring_;
};

/// A loop for each way in which bytes are moved, both at once, each in a thread of its own, as the transfer service has
/// them. Two threads on two cores pay for more than one does in which the ways take turns: they wake and interrupt each
/// other, share what the cores share, and gather half as many operations at a time. So it is by this, and not by one
/// loop for both, that the service's processor time is judged. Not thread-safe.
class BareNvmeEachWay {
 public:
  BareNvmeEachWay(const BareNvme::Part& part, std::uint64_t read_bytes, std::uint64_t written_bytes,
                  const BareNvme::Options& options);

  std::size_t threads() const noexcept { return ways_.size(); }
  /// All of both. Throws IoError.
  double seconds();

 private:
  struct Way {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::unique_ptr<BareNvme> loop;
  };
  std::vector<Way> ways_;
};

/// A loop without checksums, and a thread beside it that takes those of as many bytes of other memory, in step with it:
/// what drive and CPU do together where neither ever waits for the other. Where they share the memory's rate that is
/// less than the drive does alone, and a checksum takes longer than it does while the drive rests. Not thread-safe.
class BareNvmeBesideChecksums {
 public:
  BareNvmeBesideChecksums(const BareNvme::Part& part, std::uint64_t read_bytes, std::uint64_t written_bytes,
                          const BareNvme::Options& options);
  ~BareNvmeBesideChecksums();
  BareNvmeBesideChecksums(const BareNvmeBesideChecksums&) = delete;
  BareNvmeBesideChecksums& operator=(const BareNvmeBesideChecksums&) = delete;

  /// All of both; returns when all checksums are taken, too, which does not count. Throws IoError.
  double seconds();
  /// That `seconds` moves.
  std::uint64_t blocks() const noexcept;
  BareNvme& loop() noexcept { return loop_; }
  const BareNvme& loop() const noexcept { return loop_; }

 private:
  void take_checksums(const std::stop_token& stop, std::uint64_t moved_before);

  const std::uint64_t read_bytes_;
  const std::uint64_t written_bytes_;
  const std::size_t block_bytes_;
  BareNvme loop_;
  std::span<std::byte> memory_;
  std::uint64_t all_checksums_ = 0;
};

}  // namespace terrace
