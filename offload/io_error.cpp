#include "offload/io_error.h"

#include <cerrno>
#include <string>
#include <string_view>

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

std::string attempt(const IoOperation& operation) {
  const bool reads = operation.direction == IoOperation::Direction::read;
  return attempt(reads ? "read" : "write", operation.bytes, operation.offset, reads ? "from" : "to", *operation.file);
}

IoError failed(const std::string& what, int error_number) {
  return IoError(what + " failed: " + errno_text(error_number), hint_for(error_number));
}

}  // namespace

IoError transfer_failed(const IoOperation& operation, int error_number) {
  return failed(attempt(operation), error_number);
}

IoError end_of_file(const IoOperation& operation, std::size_t moved) {
  return IoError(attempt(operation) + " failed: end of file after " + std::to_string(moved) + " B",
                 "the file was cut short by something else");
}

IoError nothing_taken(const IoOperation& operation, std::size_t moved) {
  return IoError(attempt(operation) + " failed: no byte was taken after " + std::to_string(moved) + " B");
}

IoError reservation_failed(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes, int error_number) {
  return failed(attempt("reservation", length_bytes, offset, "in", file), error_number);
}

}  // namespace terrace
