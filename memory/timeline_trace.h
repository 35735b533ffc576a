/// A timeline as a trace of Chrome's format, which ui.perfetto.dev and chrome://tracing open: {"traceEvents": [...],
/// "otherData": {"version": 1, ...}}. Times are microseconds since the timeline began.
///
/// Tracks: steps, stalls (by cause), update, one for each link, and what was zeroed. Slices of one track that overlap
/// go on further rows of it ("host→device 2"); what passes the host without staying there is on both links. Counters:
/// the bytes of each tier by kind, and the tier's highest use since the moment before. `otherData` has the budgets, how
/// many events are missing at the beginning, and since when none is.
#pragma once

#include <ostream>

#include "memory/timeline_event.h"

namespace terrace {

/// The stream's state says whether it succeeded.
void write_trace(const TimelineSnapshot& timeline, std::ostream& out);

}  // namespace terrace
