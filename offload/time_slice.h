/// How soon the system lets a thread run that has been asleep, where every core is busy.
#pragma once

namespace terrace {

/// Has the calling thread run soon after each time that it is woken, in exchange for shorter turns: a link's thread has
/// little to do each time, and its drive waits meanwhile. What it gets of a core altogether stays the same. It is no
/// good for who is woken for each of many things in turn: the thread that wakes it would have to stop each time.
///
/// Linux knows slices a thread from 6.12 on (EEVDF); older systems, and those that refuse, wake it as any other.
void prefer_short_time_slices() noexcept;

}  // namespace terrace
