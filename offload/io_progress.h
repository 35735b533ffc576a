#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#include "offload/io_engine.h"

namespace terrace {

/// An operation on its way: what is still to be asked of the kernel, and what the kernel's answers mean.
///
/// Whoever runs it asks for the next piece and tells the result, until it is over. Not thread-safe.
class IoProgress {
 public:
  /// Over at once if there is nothing to move.
  explicit IoProgress(const IoOperation& operation) noexcept : operation_(operation) {}

  const IoOperation& operation() const noexcept { return operation_; }
  bool over() const noexcept { return error_ || moved_ == operation_.bytes; }

  // The next piece: all that is left, but no more than the kernel takes in one call.
  std::byte* memory() const noexcept { return operation_.memory + moved_; }
  std::size_t bytes() const noexcept;
  std::uint64_t offset() const noexcept { return operation_.offset + moved_; }

  /// What one call gave: bytes moved, or an errno value negated. After an interruption or a shortage that may pass,
  /// the same piece is next; anything else that moved nothing ends the transfer.
  void advance(std::int64_t result) noexcept;

  IoCompletion completion() const noexcept { return {operation_.owner, error_}; }

 private:
  IoOperation operation_;
  std::size_t moved_ = 0;
  int retries_ = 0;  // in a row
  std::exception_ptr error_;
};

/// Runs a transfer to its end with pread or pwrite on this thread.
void run_here(IoProgress& transfer) noexcept;

}  // namespace terrace
