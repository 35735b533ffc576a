#include "offload/file_io.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

#include "offload/io_error.h"

namespace terrace {

void run_io(const IoOperation& operation) {
  std::size_t done = 0;
  while (done < operation.bytes) {
    std::byte* memory = operation.memory + done;
    const std::size_t left = operation.bytes - done;
    const auto offset = static_cast<off_t>(operation.offset + done);
    const ssize_t moved = operation.direction == IoOperation::Direction::read
                              ? ::pread(operation.file->descriptor, memory, left, offset)
                              : ::pwrite(operation.file->descriptor, memory, left, offset);
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
    } else if (moved == 0) {
      throw io_stopped_short(operation, done);  // repeating it could spin for ever
    } else if (const int error_number = errno; error_number != EINTR) {
      throw io_error(operation, error_number);
    }
  }
}

bool set_space_aside(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes) {
  // Not posix_fallocate: where the file system lacks the call, glibc would write to every block.
  while (::fallocate(file.descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(length_bytes)) != 0) {
    const int error_number = errno;
    if (error_number == EOPNOTSUPP || error_number == ENOSYS) return false;
    if (error_number != EINTR) throw io_error("reservation", "in", file, offset, length_bytes, error_number);
  }
  return true;
}

}  // namespace terrace
