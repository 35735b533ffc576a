/// Who runs queued updates.
#pragma once

namespace terrace {

/// Whether a thread of the session's own does, beside the program's computation; otherwise whoever needs an update runs
/// it, as LibTorch computes on every core.
bool updates_run_in_background();

}  // namespace terrace
