#pragma once

#include <string>

#include "offload/io_engine.h"

namespace terrace {

/// Linux's io_uring: operations are queued to the kernel without a thread of their own; registered memory is mapped for
/// the drive once instead of each time.
class UringEngine final : public IoEngine {
 public:
  /// Whether this system gives us a ring with what we need; otherwise says why not.
  static bool available(std::string* why_not = nullptr);

  std::string_view name() const noexcept override { return "io_uring"; }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered) override;
};

}  // namespace terrace
