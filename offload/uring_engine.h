#pragma once

#include <string>

#include "offload/io_engine.h"

namespace terrace {

/// Linux's io_uring, a ring for each queue. Registered memory is pinned once instead of at each transfer.
///
/// Needs Linux 5.15. A ring whose memory cannot be registered (RLIMIT_MEMLOCK) works without, which is logged.
class UringEngine : public IoEngine {
 public:
  /// Whether a ring as large as those of the transfer service can be opened here, and knows every operation we use; if
  /// not, `why_not` says what failed.
  static bool available(std::string* why_not = nullptr);

  std::string_view name() const noexcept override { return "io_uring"; }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered = {},
                                      std::span<const IoFile* const> files = {}) override;
};

}  // namespace terrace
