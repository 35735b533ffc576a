#include "offload/dead_extent_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "base/error.h"
#include "offload/checksum.h"
#include "offload/errno_text.h"
#include "offload/file_io.h"

namespace terrace {
namespace {

constexpr auto kLookAgainAfter = std::chrono::milliseconds(5);

/// False also where it belongs to somebody else.
bool is_gone(std::int64_t process) {
  return process <= 0 || process > std::numeric_limits<pid_t>::max() ||
         (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH);
}

}  // namespace

DeadExtentFile::DeadExtentFile(const std::filesystem::path& path) {
  Patience patience;
  take(path, patience);
}

DeadExtentFile::DeadExtentFile(const std::filesystem::path& path, Patience& patience) { take(path, patience); }

void DeadExtentFile::take(const std::filesystem::path& path, Patience& patience) {
  open(path);
  try {
    // In this order: a creator locks first and writes the header last, so a header whose lock is free has no creator.
    read_header();
    lock(patience);
  } catch (...) {
    ::close(file_.descriptor);
    throw;
  }
}

DeadExtentFile::~DeadExtentFile() { ::close(file_.descriptor); }

void DeadExtentFile::open(const std::filesystem::path& path) {
  file_.path = path;
  do {
    file_.descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  } while (file_.descriptor < 0 && errno == EINTR);
  if (file_.descriptor < 0) {
    throw IoError("nvme: opening " + path.string() + " failed: " + errno_text(errno));
  }
}

void DeadExtentFile::read_header() {
  struct stat status {};
  const bool is_file = ::fstat(file_.descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const auto refuse = [&](const std::string& why) {
    throw CorruptData("nvme: " + file_.path.string() + " is not taken for an extent file: " + why);
  };
  if (!is_file || size < sizeof header_) refuse("it has no header");
  read_file_at(file_, 0, std::as_writable_bytes(std::span(&header_, 1)));
  if (std::memcmp(header_.magic, ExtentFileHeader::kMagic, sizeof header_.magic) != 0) refuse("it begins otherwise");
  if (header_.version != ExtentFileHeader::kVersion) {
    refuse("it is of version " + std::to_string(header_.version) + ", and this is " +
           std::to_string(ExtentFileHeader::kVersion));
  }
  const std::uint64_t bytes = header_.extent_bytes;
  if (bytes == 0 || bytes % 4096 != 0 || header_.extent_count > size / bytes ||
      extent_file_bytes(bytes, header_.extent_count) > size) {
    refuse("it is shorter than its header says");
  }
}

void DeadExtentFile::lock(Patience& patience) {
  for (;;) {
    if (::flock(file_.descriptor, LOCK_EX | LOCK_NB) == 0) break;
    const int error_number = errno;
    if (error_number == EINTR) continue;
    const bool may_pass = error_number == EWOULDBLOCK && is_gone(header_.process) && patience.looks_left > 0;
    if (!may_pass) {
      throw IoError("nvme: lock of " + file_.path.string() + " failed: " + errno_text(error_number),
                    "it belongs to a process that lives");
    }
    --patience.looks_left;
    std::this_thread::sleep_for(kLookAgainAfter);  // for the kernel, which tells nobody when it is done
  }
  // Or another process has just removed it.
  if (!has_its_name(file_)) {
    throw IoError("nvme: " + file_.path.string() + " was removed or replaced while it was opened");
  }
}

ExtentRecord DeadExtentFile::record_of(std::uint64_t extent) const {
  ExtentRecord record;
  read_file_at(file_, records_offset(header_.extent_bytes, header_.extent_count) + extent * ExtentRecord::kBytes,
               std::as_writable_bytes(std::span(&record, 1)));
  return record;
}

DeadExtentFile::Extent DeadExtentFile::look_at(std::uint64_t extent, std::vector<std::byte>& content) const {
  const ExtentRecord record = record_of(extent);
  const auto* const raw = reinterpret_cast<const std::byte*>(&record);
  if (std::all_of(raw, raw + sizeof record, [](std::byte each) { return each == std::byte{}; })) {
    return {};
  }
  if (record.own_checksum != own_checksum_of(record, extent) || record.bytes > header_.extent_bytes) {
    return {.content = Content::damaged};
  }
  content.resize(static_cast<std::size_t>(record.bytes));
  read_file_at(file_, ExtentFileHeader::kBytes + extent * header_.extent_bytes, content);
  if (checksum_of(content) != record.content_checksum) {
    return {.content = Content::damaged};
  }
  return {.content = Content::whole, .sequence = record.sequence, .bytes = record.bytes};
}

std::vector<DeadExtentFile::Extent> DeadExtentFile::survey() const {
  std::vector<Extent> extents;
  std::vector<std::byte> content;
  for (std::uint64_t extent = 0; extent < extent_count(); ++extent) {
    extents.push_back(look_at(extent, content));
  }
  return extents;
}

std::vector<std::byte> DeadExtentFile::read(std::uint64_t extent) const {
  if (extent >= extent_count()) {
    throw LogicError("nvme: extent " + std::to_string(extent) + " of " + file_.path.string() + ", which has " +
                     std::to_string(extent_count()));
  }
  std::vector<std::byte> content;
  if (look_at(extent, content).content != Content::whole) {
    throw CorruptData("nvme: extent " + std::to_string(extent) + " of " + file_.path.string() + " is not whole");
  }
  return content;
}

}  // namespace terrace
