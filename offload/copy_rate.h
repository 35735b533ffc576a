#pragma once

namespace terrace {

/// Bytes per second that one core of this machine copies from memory to memory, beyond its caches. Takes a few
/// hundredths of a second.
double measured_copy_rate();

}  // namespace terrace
