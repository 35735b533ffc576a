/// Memory that runs out, for tests of what is left behind then.
#pragma once

namespace terrace {

/// While it lives, this thread's allocation after so many others throws std::bad_alloc: that one, and no other.
class FailingAllocation {
 public:
  explicit FailingAllocation(int others_before) noexcept;
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  /// Not under a sanitizer, whose own allocation this would replace.
  static bool possible() noexcept;
};

}  // namespace terrace
