#include "offload/file_io.h"

#include <cerrno>
#include <exception>
#include <fcntl.h>
#include <sys/stat.h>

#include "offload/io_error.h"
#include "offload/io_progress.h"

namespace terrace {
namespace {

void run_or_throw(const IoOperation& operation) {
  IoProgress transfer(operation);
  run_here(transfer);
  if (const std::exception_ptr error = transfer.completion().error) std::rethrow_exception(error);
}

}  // namespace

void read_file_at(const IoFile& file, std::uint64_t offset, std::span<std::byte> bytes) {
  run_or_throw({IoOperation::Direction::read, &file, offset, bytes.data(), bytes.size()});
}

void write_file_at(const IoFile& file, std::uint64_t offset, std::span<const std::byte> bytes) {
  auto* memory = const_cast<std::byte*>(bytes.data());  // a write only reads it
  run_or_throw({IoOperation::Direction::write, &file, offset, memory, bytes.size()});
}

bool has_its_name(const IoFile& file) noexcept {
  struct stat opened {};
  struct stat named {};
  return ::fstat(file.descriptor, &opened) == 0 && ::lstat(file.path.c_str(), &named) == 0 &&
         named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

bool set_space_aside(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes) {
  // Not posix_fallocate: where the file system lacks the call, glibc would write to every block.
  while (::fallocate(file.descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(length_bytes)) != 0) {
    const int error_number = errno;
    if (error_number == EINTR) continue;
    if (error_number == EOPNOTSUPP || error_number == ENOSYS) return false;
    throw reservation_failed(file, offset, length_bytes, error_number);
  }
  return true;
}

}  // namespace terrace
