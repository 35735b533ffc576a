/// By which point of the device's computation the room of a new copy there is free of those that have left it.
///
/// The program may be far ahead of a device that computes behind it: what has left may be in use for long. Room is used
/// again in the order in which it was left, so that a copy which finds room enough beside what was left last waits for
/// none of that. Guarded by the lock of its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "offload/device.h"

namespace terrace {

class LeftRoom {
 public:
  explicit LeftRoom(Device& device) : device_(device) {}

  /// A copy has left, which `last_use` is the last to use.
  void left(std::uint64_t bytes, Fence last_use);
  /// Room has been taken, and so many bytes are free beside it: reached once the room may be used.
  Fence taken(std::uint64_t free_bytes);

 private:
  struct Left {
    std::uint64_t bytes;
    Fence last_use;
  };
  /// Of those whose last use has ended so many may stay: asking the device costs.
  static constexpr std::size_t few = 16;

  Device& device_;
  std::deque<Left> left_;  ///< in that order
  Fence used_again_{};     ///< the last use of all whose room may be in use again
};

}  // namespace terrace
