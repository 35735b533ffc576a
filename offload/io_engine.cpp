#include "offload/io_engine.h"

#include <cerrno>
#include <fcntl.h>
#include <string>
#include <unistd.h>

#include "base/error.h"
#include "offload/errno_text.h"

namespace terrace {
namespace {

std::string hint_for(int error_number) {
  switch (error_number) {
    case ENOSPC:
      return "free space or lower nvme.memory";
    case EDQUOT:
      return "free space, raise the disk quota or lower nvme.memory";
    case EIO:
      return "the drive may be failing: see the kernel log (dmesg), or set nvme.paths to another drive";
    case EFBIG:
      return "raise the limit on file sizes (ulimit -f) or lower nvme.memory";
    default:
      return "";
  }
}

/// What was attempted: "nvme: write of 4096 B at offset 0 to PATH".
std::string attempt(std::string_view verb, std::uint64_t length, std::uint64_t offset, std::string_view preposition,
                    const IoFile& file) {
  return "nvme: " + std::string(verb) + " of " + std::to_string(length) + " B at offset " + std::to_string(offset) +
         " " + std::string(preposition) + " " + file.path.string();
}

IoError failed(const std::string& what, int error_number) {
  return IoError(what + " failed: " + errno_text(error_number), hint_for(error_number));
}

}  // namespace

bool IoEngine::allocate(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes) {
  // Not posix_fallocate: where the file system lacks the call, glibc would write to every block.
  while (::fallocate(file.descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(length_bytes)) != 0) {
    const int error_number = errno;
    if (error_number == EINTR) continue;
    if (error_number == EOPNOTSUPP || error_number == ENOSYS) return false;
    throw failed(attempt("reservation", length_bytes, offset, "in", file), error_number);
  }
  return true;
}

void PosixEngine::read(const IoFile& file, std::uint64_t offset, std::span<std::byte> bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t moved =
        ::pread(file.descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
      continue;
    }
    const int error_number = errno;
    const std::string what = attempt("read", bytes.size(), offset, "from", file);
    if (moved == 0) {
      throw IoError(what + " failed: end of file after " + std::to_string(done) + " B",
                    "the file was cut short by something else");
    }
    if (error_number != EINTR) throw failed(what, error_number);
  }
}

void PosixEngine::write(const IoFile& file, std::uint64_t offset, std::span<const std::byte> bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t moved =
        ::pwrite(file.descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
      continue;
    }
    const int error_number = errno;
    const std::string what = attempt("write", bytes.size(), offset, "to", file);
    // Zero is no error by POSIX, but repeating it could spin for ever.
    if (moved == 0) throw IoError(what + " failed: no byte was taken after " + std::to_string(done) + " B");
    if (error_number != EINTR) throw failed(what, error_number);
  }
}

}  // namespace terrace
