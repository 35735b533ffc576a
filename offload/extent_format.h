/// What an extent file looks like on the disk, in the machine's byte order: a header, then the extents, then a record
/// of each extent.
///
/// A record says what was written into its extent last. It is written when the extent has been, so that one whose
/// content has the record's checksum is whole, and one that was being written when its process was killed is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace terrace {

struct ExtentFileHeader {
  static constexpr char kMagic[8] = {'T', 'E', 'R', 'R', 'A', 'C', 'E', '\0'};
  static constexpr std::uint32_t kVersion = 2;
  static constexpr std::size_t kBytes = 4096;

  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t extent_bytes;
  std::uint64_t extent_count;
  std::int64_t process;  // pid of the creator: for people; liveness is told by the lock
  std::int64_t created_unix_seconds;
  std::byte unused[kBytes - 48];
};
static_assert(sizeof(ExtentFileHeader) == ExtentFileHeader::kBytes);
static_assert(std::is_trivially_copyable_v<ExtentFileHeader>);

struct ExtentRecord {
  static constexpr std::size_t kBytes = 64;

  std::uint64_t sequence;          // of the write among all of its store, from 1; 0: nothing is in the extent
  std::uint64_t bytes;             // that were written
  std::uint64_t content_checksum;  // XXH3 of them
  std::byte unused[kBytes - 32];
  std::uint64_t own_checksum;  // XXH3 of all before it, with the extent's number in the file as the seed
};
static_assert(sizeof(ExtentRecord) == ExtentRecord::kBytes);
static_assert(std::is_trivially_copyable_v<ExtentRecord>);

std::uint64_t own_checksum_of(const ExtentRecord& record, std::uint64_t extent) noexcept;

/// Where the records begin, and where they end, which is a multiple of 4096 as extents are.
constexpr std::uint64_t records_offset(std::uint64_t extent_bytes, std::uint64_t extent_count) noexcept {
  return ExtentFileHeader::kBytes + extent_count * extent_bytes;
}
constexpr std::uint64_t extent_file_bytes(std::uint64_t extent_bytes, std::uint64_t extent_count) noexcept {
  constexpr std::uint64_t page = 4096;
  const std::uint64_t records = (extent_count * ExtentRecord::kBytes + page - 1) / page * page;
  return records_offset(extent_bytes, extent_count) + records;
}

}  // namespace terrace
