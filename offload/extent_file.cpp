#include "offload/extent_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <functional>
#include <string>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "base/error.h"
#include "base/fallback.h"
#include "base/log.h"
#include "base/units.h"
#include "offload/errno_text.h"
#include "offload/file_io.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "terrace-";
constexpr const char* kSuffix = ".extents";

/// Absolute, so that it is still found when the process works in another folder.
fs::path next_path(const fs::path& folder) {
  static std::atomic<unsigned> next{0};
  std::error_code error;
  const fs::path absolute = fs::absolute(folder, error);
  return (error ? folder : absolute) /
         (kPrefix + std::to_string(::getpid()) + "-" + std::to_string(next.fetch_add(1)) + kSuffix);
}

bool is_named_like_ours(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(kPrefix) && name.ends_with(kSuffix);
}

/// Why direct transfers of 4096 B units would be refused; empty where they would not, or where the file system does not
/// say.
std::string why_not_direct(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0) {
    const auto divides_ours = [](std::uint32_t bytes) { return bytes != 0 && ExtentFileHeader::kBytes % bytes == 0; };
    if (status.stx_dio_offset_align == 0) return "its file system has no direct transfers (O_DIRECT)";
    if (!divides_ours(status.stx_dio_offset_align) || !divides_ours(status.stx_dio_mem_align)) {
      return "its file system transfers directly only in units of " +
             std::to_string(std::max(status.stx_dio_offset_align, status.stx_dio_mem_align)) + " B";
    }
  }
#else
  static_cast<void>(descriptor);
#endif
  return "";
}

/// If the file was left by a dead process, calls `visit` while holding its lock, so that no two processes do at once.
void visit_if_dead(const fs::path& path, Patience& patience, const std::function<void(const struct stat&)>& visit) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  try {
    const DeadExtentFile file(path, patience);
    if (::fstat(file.file().descriptor, &status) == 0) visit(status);
  } catch (const Error&) {  // not ours, or in use
  }
}

void for_each_dead_file(const fs::path& folder, Patience& patience,
                        const std::function<void(const fs::path&, const struct stat&)>& visit) {
  std::error_code error;
  std::vector<fs::path> candidates;
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (is_named_like_ours(entry->path())) candidates.push_back(entry->path());
  }
  if (error) {
    throw IoError("nvme: listing of " + folder.string() + " failed: " + errno_text(error.value()),
                  "set nvme.paths to folders that can be read and written");
  }
  for (const fs::path& path : candidates) {
    visit_if_dead(path, patience, [&](const struct stat& status) { visit(path, status); });
  }
}

}  // namespace

ExtentFile::ExtentFile() : owner_(::getpid()) {}

// Delegates, so that the destructor closes and removes the file should a later step of this constructor throw.
ExtentFile::ExtentFile(const fs::path& folder, std::size_t extent_bytes, std::uint64_t extent_count) : ExtentFile() {
  extent_bytes_ = extent_bytes;
  extent_count_ = extent_count;
  create_in(folder);
  open_for_transfers();
  direct_ = go_direct();
  lock();
  make_room_for_records();
  write_header();
}

void ExtentFile::create_in(const fs::path& folder) {
  // A name can be taken where process numbers repeat: after a restart, or in containers that share a folder.
  constexpr int kAttempts = 10000;
  int error_number = EEXIST;
  for (int attempt = 0; attempt < kAttempts && (error_number == EEXIST || error_number == EINTR); ++attempt) {
    bookkeeping_.path = next_path(folder);
    bookkeeping_.descriptor = ::open(bookkeeping_.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (bookkeeping_.descriptor >= 0) return;
    error_number = errno;
  }
  throw IoError("nvme: creation of " + bookkeeping_.path.string() + " failed: " + errno_text(error_number),
                error_number == ENOSPC ? "free space or set nvme.paths to another drive"
                                       : "set nvme.paths to folders that can be written");
}

/// With a descriptor of their own, which may go past the page cache.
void ExtentFile::open_for_transfers() {
  file_.path = bookkeeping_.path;
  do {
    file_.descriptor = ::open(file_.path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  } while (file_.descriptor < 0 && errno == EINTR);
  if (file_.descriptor < 0 || !has_its_name(bookkeeping_)) {
    throw IoError("nvme: opening " + file_.path.string() +
                      ", just made, failed: " + (file_.descriptor < 0 ? errno_text(errno) : "it was replaced"),
                  "set nvme.paths to folders that nothing else changes");
  }
}

bool ExtentFile::go_direct() {
  // Not O_DIRECT in open: a file system without it makes the file before it refuses.
  std::string why_not = why_not_direct(file_.descriptor);
  if (why_not.empty()) {
    const int flags = ::fcntl(file_.descriptor, F_GETFL);
    if (flags >= 0 && ::fcntl(file_.descriptor, F_SETFL, flags | O_DIRECT) == 0) return true;
    why_not = "its file system refuses direct transfers (O_DIRECT): " + errno_text(errno);
  }
  note_fallback("nvme: transfers in " + file_.path.parent_path().string() + " go through the page cache", why_not);
  return false;
}

/// By the descriptor of the transfers: those that the kernel still carries out for a process that was killed hold the
/// lock, so that whoever gets it finds a file that changes no more.
void ExtentFile::lock() {
  while (::flock(file_.descriptor, LOCK_EX | LOCK_NB) != 0) {
    const int error_number = errno;
    if (error_number == EINTR) continue;
    throw IoError("nvme: lock of " + file_.path.string() + " failed: " + errno_text(error_number),
                  "set nvme.paths to folders on a local file system");
  }
}

/// The file has its whole size from now on, so that records lie within it and transfers never extend it.
void ExtentFile::make_room_for_records() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
      limit.rlim_cur < capacity_bytes()) {  // the system would end the process
    throw IoError("nvme: " + file_.path.string() + " of " + format_bytes(capacity_bytes()) +
                      " exceeds the limit on the size of files, " + format_bytes(limit.rlim_cur),
                  "raise the limit (ulimit -f) or lower nvme.memory");
  }
  while (::ftruncate(bookkeeping_.descriptor, static_cast<off_t>(capacity_bytes())) != 0) {
    const int error_number = errno;
    if (error_number == EINTR) continue;
    throw IoError("nvme: growing " + file_.path.string() + " to " + std::to_string(capacity_bytes()) +
                      " B failed: " + errno_text(error_number),
                  "lower nvme.memory");
  }
  const std::uint64_t first = records_offset(extent_bytes_, extent_count_);
  set_space_aside(bookkeeping_, first, capacity_bytes() - first);
}

void ExtentFile::write_header() {
  ExtentFileHeader header{};
  std::memcpy(header.magic, ExtentFileHeader::kMagic, sizeof header.magic);
  header.version = ExtentFileHeader::kVersion;
  header.header_bytes = ExtentFileHeader::kBytes;
  header.extent_bytes = extent_bytes_;
  header.extent_count = extent_count_;
  header.process = owner_;
  header.created_unix_seconds = std::time(nullptr);
  write_file_at(bookkeeping_, 0, std::as_bytes(std::span(&header, 1)));
  // So that after a power failure the space of this file is still known to be ours.
  if (::fdatasync(bookkeeping_.descriptor) != 0) {
    throw IoError("nvme: sync of " + file_.path.string() + " failed: " + errno_text(errno));
  }
}

void ExtentFile::remove() noexcept {
  if (owner_ != ::getpid()) return;
  if (has_its_name(bookkeeping_) && ::unlink(bookkeeping_.path.c_str()) == 0) return;
  struct stat status {};
  if (::fstat(bookkeeping_.descriptor, &status) == 0 && status.st_nlink > 0) {
    log(LogLevel::warning, "nvme: " + bookkeeping_.path.string() +
                               " cannot be removed: it was moved, or its folder does not allow it; what is left of it "
                               "takes space until it is deleted");
  }
}

ExtentFile::~ExtentFile() {
  remove();
  for (const IoFile* file : {&file_, &bookkeeping_}) {
    if (file->descriptor >= 0) ::close(file->descriptor);
  }
}

void ExtentFile::reserve_space(std::uint64_t first_extent, std::uint64_t count) {
  if (set_space_aside(file_, offset_of(first_extent), count * extent_bytes_)) return;
  if (space_is_guaranteed_.exchange(false, std::memory_order_relaxed)) {
    note_fallback("nvme: a full disk shows only when " + file_.path.parent_path().string() + " is written",
                  "its file system cannot set space aside");
  }
}

void ExtentFile::record(std::uint64_t first_extent, std::span<ExtentRecord> records) {
  for (std::size_t i = 0; i < records.size(); ++i) {
    records[i].own_checksum = own_checksum_of(records[i], first_extent + i);
  }
  write_file_at(bookkeeping_, records_offset(extent_bytes_, extent_count_) + first_extent * ExtentRecord::kBytes,
                std::as_bytes(records));
}

void ExtentFile::clear_records(std::uint64_t first_extent, std::uint64_t count) {
  if (owner_ != ::getpid()) return;  // a forked copy of a store that goes on
  const std::vector<std::byte> nothing(count * ExtentRecord::kBytes);
  write_file_at(bookkeeping_, records_offset(extent_bytes_, extent_count_) + first_extent * ExtentRecord::kBytes,
                nothing);
}

std::vector<fs::path> remove_dead_extent_files(const fs::path& folder, Patience& patience) {
  std::vector<fs::path> removed;
  for_each_dead_file(folder, patience, [&](const fs::path& path, const struct stat&) {
    if (::unlink(path.c_str()) == 0) removed.push_back(path);
  });
  return removed;
}

std::vector<fs::path> remove_dead_extent_files(const fs::path& folder) {
  Patience patience;
  return remove_dead_extent_files(folder, patience);
}

std::uint64_t dead_extent_file_bytes(const fs::path& folder, Patience& patience) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return 0;
  std::uint64_t bytes = 0;
  for_each_dead_file(folder, patience, [&](const fs::path&, const struct stat& status) {
    bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;  // st_blocks counts 512-byte units everywhere
  });
  return bytes;
}

std::uint64_t dead_extent_file_bytes(const fs::path& folder) {
  Patience patience;
  return dead_extent_file_bytes(folder, patience);
}

}  // namespace terrace
