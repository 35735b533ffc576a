/// Since when the device has had nothing to compute, while a thread of the program waits for memory.
///
/// A device that computes behind the program, as a GPU does, is still busy when the program begins to wait: only what
/// is left of the wait once it has computed all is time lost. What other threads issue meanwhile is not seen. Threads:
/// one's own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "offload/device.h"

namespace terrace {

class DeviceIdle {
 public:
  /// Of what has been issued by now. Where the device fails to say, it counts as idle.
  explicit DeviceIdle(Device& device) noexcept : device_(device) {
    try {
      computed_ = device.computation();
      look();
    } catch (...) {
      since_ns_ = 0;  // who uses the device next meets the error
    }
  }

  /// Waits until `changed` is notified, or for a moment while the device is not known to be idle: whoever waits looks
  /// at what for, in either case.
  template <class Condition, class Lock>
  void wait(Condition& changed, Lock& lock) {
    if (since_ns_) {
      changed.wait(lock);
      return;
    }
    changed.wait_for(lock, look_every);
    look();
  }

  /// The part of a wait in which it was idle begins then, and ends with the wait.
  std::int64_t begin_within(std::int64_t begin_ns, std::int64_t end_ns) const noexcept {
    return std::clamp(since_ns_.value_or(end_ns), begin_ns, end_ns);
  }

 private:
  /// Short beside a stall that matters, and long beside what it takes to wake and to look.
  static constexpr std::chrono::microseconds look_every{50};

  void look() noexcept { since_ns_ = device_.reached_ns(computed_); }

  Device& device_;
  Fence computed_{};
  std::optional<std::int64_t> since_ns_;
};

}  // namespace terrace
