/// The threads that an update runs on.
///
/// Work is cut into parts whose results do not depend on who does them, nor on how many do: their number never changes
/// a bit. Nor does what the program has told its own threads of rounding and of subnormal numbers: parts run by the
/// standard (see standard_arithmetic.h). Threads come from oneTBB, which shares them among all of its users in the
/// process: they run on hardware threads of the update's own for as long as they take parts. The thread that calls runs
/// where it does.
///
/// Threads: `for_each` may be called by several at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "offload/processors.h"

namespace terrace {

class UpdateThreads {
 public:
  /// At most `count`, with the thread that calls: at least that one, and no more than oneTBB runs now, which is one a
  /// core unless the program has told it otherwise. Its threads take their parts on `processors`.
  explicit UpdateThreads(int count, Processors processors = {});
  ~UpdateThreads();
  UpdateThreads(const UpdateThreads&) = delete;
  UpdateThreads& operator=(const UpdateThreads&) = delete;

  int count() const noexcept { return count_; }
  /// Calls `part(i)` for every i below `parts`, each once, and returns when all have ended. Those that take long are
  /// best the last. `part` must not throw.
  void for_each(std::size_t parts, const std::function<void(std::size_t)>& part) const;

 private:
  struct Arena;

  const int count_;
  const Processors processors_;
  const std::unique_ptr<Arena> arena_;
};

}  // namespace terrace
