/// Who runs queued updates, and on how many threads.
#pragma once

namespace terrace {

/// Whether a thread of the session's own does, beside the program's computation; otherwise whoever needs an update runs
/// it, as LibTorch computes on every core.
bool updates_run_in_background();

/// In the background those that computation leaves free; otherwise all, as nothing is computed meanwhile.
int update_thread_count();

}  // namespace terrace
