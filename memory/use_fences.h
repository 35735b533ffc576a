/// By which point of the device's computation each use of a chunk has ended.
///
/// The program may be far ahead of a device that computes behind it. What takes the room of a chunk, or its bytes,
/// waits for the last use of that one, and not for all that has been issued since: so points are noted as uses are
/// issued, and the first one behind a use is what stands for it. Guarded by the lock of its owner.
#pragma once

#include <cstdint>
#include <deque>

#include "offload/device.h"

namespace terrace {

class UseFences {
 public:
  explicit UseFences(Device& device) : device_(device) {}

  /// Computation that uses something has been issued. Returns its number: 1, 2 and so on.
  std::uint64_t issued() noexcept { return ++uses_; }
  /// Notes the point that has been issued to so far. Throws what the device does.
  void note_point();
  /// Reached once use `number`, or 0 for none, has ended. Throws what the device does.
  Fence after(std::uint64_t number);

 private:
  struct Point {
    std::uint64_t uses;  ///< that come before it
    Fence fence;
  };
  /// Of points that have been reached so many may stay: asking the device costs.
  static constexpr std::size_t few_points = 16;

  Device& device_;
  std::uint64_t uses_ = 0;
  std::uint64_t ended_ = 0;   ///< at least so many are known to have
  std::deque<Point> points_;  ///< behind those, in order
};

}  // namespace terrace
