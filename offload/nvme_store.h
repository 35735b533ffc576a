#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "offload/extent_file.h"
#include "offload/extent_space.h"
#include "offload/io_engine.h"

namespace terrace {

/// The NVMe tier: extents of one size in one file a path, each verified by checksum when it is read.
///
/// `capacity_bytes` is everything the store occupies, headers included; the files never grow beyond their even share
/// of it. Space on the drive is set aside when an extent is first reserved, so a full disk is told by `reserve`.
/// The files are the store's own, locked while it lives and removed with it; those left by killed processes are
/// removed at construction, any other file is left alone. What an extent holds is recorded beside it when it has been
/// written, so that of a store whose process was killed can be told what is whole (dead_extent_file.h).
///
/// The store moves no bytes: it says which operation does, and the caller has a queue carry that out between
/// `begin_...` and `end_...`, one of the latter for each of the former, whatever becomes of the operation.
///
/// Thread-safe: different extents are read and written concurrently, and no lock is held across a checksum. A use that
/// breaks the life of an extent (reserve, write, read any number of times, release) throws LogicError, also when it
/// does so by a race: reading what was never written whole, or touching an extent whose write is in flight.
/// A failed operation changes nothing else, and the extent can be written again, or retired.
class NvmeStore {
 public:
  /// `extent_bytes` is a multiple of 4096.
  /// Throws OutOfMemory if a path's share does not hold one extent, IoError if a path is no folder, cannot be created
  /// or written, or if `capacity_bytes` exceeds the free space.
  NvmeStore(std::vector<std::filesystem::path> paths, std::uint64_t capacity_bytes, std::size_t extent_bytes);
  ~NvmeStore();
  NvmeStore(const NvmeStore&) = delete;
  NvmeStore& operator=(const NvmeStore&) = delete;

  /// All or none: `count` extents, with contiguous ids where there is such a run, and while there are others not on a
  /// path whose last write failed. Throws OutOfMemory if that many are
  /// not free, IoError if the drive has no space for them.
  std::vector<ExtentId> reserve(std::size_t count);
  /// All or none: throws LogicError, and releases nothing, if one of them is not held or has I/O in flight. That their
  /// records could not be cleared is logged: it matters only to who looks at the store once it is dead.
  void release(std::span<const ExtentId> extents);
  /// Takes a bad extent out of use for good; the holder must not release it as well.
  void retire(ExtentId extent);

  // Transfers. `block` starts at a multiple of 4096 and reaches to the next multiple of 4096 B after `bytes`: whole
  // units are moved. It stays the operation's until the matching end. Operations come without an owner.

  // Several at a time: their checksums are then taken one after another. With other work between them the CPU's
  // prefetcher loses its place, and each takes about a third longer for 64 KiB.

  // These throw nothing: each of the several has an error of its own.

  /// A transfer that is to start, and then the operation that does it, or why there is none and nothing has begun.
  struct Beginning {
    ExtentId extent;
    std::byte* block = nullptr;
    std::size_t bytes = 0;
    IoOperation operation{};
    std::exception_ptr error{};
  };
  /// Starts writes of at most `extent_bytes()` each; what follows in the last unit is set to zero. The checksum is
  /// taken here, so `block` must not change any more. Until its write has ended an extent counts as never written.
  void begin_writes(std::span<Beginning> writes) noexcept;
  /// The same of one; throws its error.
  IoOperation begin_write(ExtentId extent, std::byte* block, std::size_t bytes);
  /// A write whose operation is over, and what that failed with.
  struct EndOfWrite {
    ExtentId extent;
    std::exception_ptr error{};
    bool is_under_way = false;  ///< for the store alone
  };
  /// Ends several; the records of neighbours are written together. An extent whose write has an error goes on counting
  /// as never written, as it does where its record fails: an IoError, which is its error then. The error of one of
  /// which no write is under way is a LogicError.
  void end_writes(std::span<EndOfWrite> ends) noexcept;
  /// The same of one; `written`: every byte was. Throws such an error.
  void end_write(ExtentId extent, bool written);

  /// Starts reads of exactly as many bytes as were written last. Several of one extent may be under way at once.
  void begin_reads(std::span<Beginning> reads) noexcept;
  /// The same of one; throws its error.
  IoOperation begin_read(ExtentId extent, std::byte* block, std::size_t bytes);
  /// A read whose operation is over, and what that failed with.
  struct EndOfRead {
    ExtentId extent;
    const std::byte* block = nullptr;
    std::exception_ptr error{};
    bool is_under_way = false;  ///< for the store alone
  };
  /// Ends several, which can then be repeated. The error of one whose `block` does not hold what was written is
  /// CorruptData, and of one of which no read is under way a LogicError.
  void end_reads(std::span<EndOfRead> ends) noexcept;
  /// The same of one; throws its error.
  void end_read(ExtentId extent, const std::byte* block, const std::exception_ptr& error);

  /// Its files stay open for as long as the process lives, though they lose their names with the store: operations on
  /// them are under way of which nobody will hear.
  void keep_files_open() noexcept { keeps_files_open_ = true; }

  std::size_t path_count() const noexcept { return paths_.size(); }
  std::size_t extent_bytes() const noexcept { return extent_bytes_; }
  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  std::uint64_t extent_count() const noexcept { return extents_.size(); }
  std::uint64_t free_extents() const;
  std::uint64_t retired_extents() const;
  /// Extents held, headers and retired extents not counted.
  std::uint64_t used_bytes() const;

  /// Where an extent lies, for messages: "PATH, offset O".
  std::string describe(ExtentId extent) const;
  std::vector<std::filesystem::path> files() const;
  /// What its operations are on; they live as long as the store.
  std::vector<const IoFile*> io_files() const;
  /// For the log: what the constructor removed.
  const std::vector<std::filesystem::path>& removed_files() const noexcept { return removed_files_; }
  /// Whether all transfers go past the page cache.
  bool direct() const noexcept;

 private:
  enum class State : std::uint8_t { free, held, written, leaving, retired };
  /// Who writes changes the checksum without the mutex, and who reads looks at it and at the length without: `writing`
  /// and `readers` keep them apart.
  struct Extent {
    std::uint64_t checksum = 0;
    std::uint64_t sequence = 0;  ///< of the last write
    std::size_t length = 0;
    std::uint32_t readers = 0;
    State state = State::free;
    bool writing = false;
    bool has_space = false;
    bool has_record = false;
  };
  ExtentFile& file_of(ExtentId extent) { return files_[static_cast<std::size_t>(extent) % files_.size()]; }
  const ExtentFile& file_of(ExtentId extent) const { return files_[static_cast<std::size_t>(extent) % files_.size()]; }
  std::uint64_t offset_of(ExtentId extent) const;
  /// Neighbours in a file, likewise for messages.
  std::string describe(std::span<const ExtentId> run) const;
  IoOperation operation(IoOperation::Direction direction, const Beginning& transfer) const;
  CorruptData not_what_was_written(ExtentId extent, std::uint64_t found) const;
  void give_space_to(std::span<const ExtentId> extents);
  void clear_records(std::vector<ExtentId> extents) noexcept;
  void record(std::span<EndOfWrite> ends) noexcept;
  std::exception_ptr record(std::span<const ExtentId> run, std::uint64_t first_in_file);
  std::vector<ExtentRecord> records_of(std::span<const ExtentId> extents) const;
  template <class Visit>
  void for_each_run(std::vector<ExtentId>& extents, Visit&& visit);

  // These need `mutex_`, which the caller passes as proof.
  using Lock = std::unique_lock<std::mutex>;
  Extent& known(const Lock&, ExtentId extent, const char* what);
  Extent& held(const Lock&, ExtentId extent, const char* what);
  Extent& idle(const Lock&, ExtentId extent, const char* what);
  std::vector<ExtentId> take(const Lock&, std::size_t count);
  void give_back(const Lock&, ExtentId extent);

  const std::vector<std::filesystem::path> paths_;
  const std::uint64_t capacity_bytes_;
  const std::size_t extent_bytes_;
  std::vector<std::filesystem::path> removed_files_;
  std::deque<ExtentFile> files_;  // one a path, in their order
  std::atomic<bool> keeps_files_open_{false};

  mutable std::mutex mutex_;
  std::vector<Extent> extents_;  // by id; its length never changes after construction
  ExtentSpace space_;
  std::uint64_t retired_extents_ = 0;
  std::uint64_t next_sequence_ = 1;
};

}  // namespace terrace
