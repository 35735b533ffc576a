#include "offload/io_error.h"

#include <cerrno>
#include <string>

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

std::string attempt(std::string_view verb, std::string_view preposition, const IoFile& file, std::uint64_t offset,
                    std::uint64_t length_bytes) {
  return "nvme: " + std::string(verb) + " of " + std::to_string(length_bytes) + " B at offset " +
         std::to_string(offset) + " " + std::string(preposition) + " " + file.path.string();
}

bool reads(const IoOperation& operation) { return operation.direction == IoOperation::Direction::read; }

}  // namespace

IoError io_error(std::string_view verb, std::string_view preposition, const IoFile& file, std::uint64_t offset,
                 std::uint64_t length_bytes, int error_number) {
  return IoError(attempt(verb, preposition, file, offset, length_bytes) + " failed: " + errno_text(error_number),
                 hint_for(error_number));
}

IoError io_error(const IoOperation& operation, int error_number) {
  return io_error(reads(operation) ? "read" : "write", reads(operation) ? "from" : "to", *operation.file,
                  operation.offset, operation.bytes, error_number);
}

IoError io_stopped_short(const IoOperation& operation, std::uint64_t done) {
  if (reads(operation)) {
    return IoError(attempt("read", "from", *operation.file, operation.offset, operation.bytes) +
                       " failed: end of file after " + std::to_string(done) + " B",
                   "the file was cut short by something else");
  }
  return IoError(attempt("write", "to", *operation.file, operation.offset, operation.bytes) +
                 " failed: no byte was taken after " + std::to_string(done) + " B");
}

}  // namespace terrace
