/// One direction of the emulated device's link: how long bytes would take at its rate and latency.
///
/// What is carried queues up behind what was carried before; the latency adds to each piece and holds up
/// nothing behind it. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>

namespace terrace {

struct LinkSpeed {
  std::uint64_t bytes_per_second = 0;  ///< 0: as fast as the copy itself
  std::int64_t latency_ns = 0;
};

class EmulatedLink {
 public:
  explicit EmulatedLink(LinkSpeed speed) noexcept : speed_(speed) {}

  /// Puts `bytes` on the link, no sooner than `after_ns`; returns when they are there. On the clock of `monotonic_ns`.
  std::int64_t carry(std::uint64_t bytes, std::int64_t after_ns = 0) noexcept;

 private:
  const LinkSpeed speed_;
  std::mutex mutex_;
  std::int64_t free_ns_ = 0;  ///< when the link has carried what was put on it
};

}  // namespace terrace
