/// Sets of hardware threads, and threads that run on one of these sets only.
///
/// Bound are threads that Terrace starts, and those of oneTBB for as long as they work for it. The program's own are
/// never: they are for the program to place.
///
/// Threads: each binds itself. Nothing here throws but for want of memory, where it says so; what the system refuses is
/// noted as a fallback, and the thread runs where it did.
#pragma once

#include <string>
#include <vector>

namespace terrace {

/// Hardware threads by the numbers that the system gives them, ascending. None stands for any that are there.
using Processors = std::vector<unsigned>;

/// "4-7,12-15", which taskset takes; "" of none. Throws where there is no memory for it.
std::string ranges_of(const Processors& processors);

/// Those that the calling thread may run on. None where the system does not tell.
Processors processors_of_this_thread() noexcept;

/// Has the calling thread run on these from now on.
void bind_this_thread(const Processors& processors) noexcept;

/// Has the calling thread run on some while this lives, and where it did before afterwards.
class BoundThread {
 public:
  explicit BoundThread(const Processors& processors) noexcept;
  ~BoundThread() { bind_this_thread(before_); }
  BoundThread(const BoundThread&) = delete;
  BoundThread& operator=(const BoundThread&) = delete;

 private:
  Processors before_;  ///< none: the thread was left alone
};

}  // namespace terrace
