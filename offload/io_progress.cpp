#include "offload/io_progress.h"

#include <algorithm>
#include <cerrno>
#include <unistd.h>

#include "offload/io_error.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::size_t kLargestPiece = std::size_t{1} << 30;  // Linux takes up to 2 GiB less a page
constexpr int kMostRetries = 10000;

/// Making the error may fail for lack of memory; that is then the error.
template <class Make>
std::exception_ptr error_from(Make make) noexcept {
  try {
    return std::make_exception_ptr(make());
  } catch (...) {
    return std::current_exception();
  }
}

/// A read from a direct file that stopped within a block can only have met the end of the file; some kernels refuse to
/// go on from there.
bool means_end_of_file(const IoOperation& operation, std::size_t moved, std::int64_t result) {
  constexpr std::size_t kSmallestBlock = 512;
  return operation.direction == Direction::read && (result == 0 || (result == -EINVAL && moved % kSmallestBlock != 0));
}

}  // namespace

std::size_t IoProgress::bytes() const noexcept { return std::min(operation_.bytes - moved_, kLargestPiece); }

void IoProgress::advance(std::int64_t result) noexcept {
  if (result > 0) {
    moved_ += static_cast<std::size_t>(result);
    retries_ = 0;
  } else if ((result == -EINTR || result == -EAGAIN) && ++retries_ <= kMostRetries) {
    return;
  } else if (means_end_of_file(operation_, moved_, result)) {
    error_ = error_from([&] { return end_of_file(operation_, moved_); });
  } else if (result == 0) {  // no error by POSIX, but repeating it could spin for ever
    error_ = error_from([&] { return nothing_taken(operation_, moved_); });
  } else {
    error_ = error_from([&] { return transfer_failed(operation_, static_cast<int>(-result)); });
  }
}

void run_here(IoProgress& transfer) noexcept {
  const IoOperation& operation = transfer.operation();
  while (!transfer.over()) {
    const auto offset = static_cast<off_t>(transfer.offset());
    const ssize_t moved = operation.direction == Direction::read
                              ? ::pread(operation.file->descriptor, transfer.memory(), transfer.bytes(), offset)
                              : ::pwrite(operation.file->descriptor, transfer.memory(), transfer.bytes(), offset);
    transfer.advance(moved < 0 ? -errno : moved);
  }
}

}  // namespace terrace
