/// A timeline as a trace of Chrome's format, which ui.perfetto.dev and chrome://tracing open: {"traceEvents": [...],
/// "otherData": {"version": 1, ...}}. Times are microseconds since the timeline began.
///
/// Groups: of the program the tracks steps, stalls (by cause) and update; of the links one each, and one of the chunks
/// that were begun without bytes; of each tier the counters bytes (by kind), total, peak (the highest since the moment
/// before) and budget. Slices of one track that overlap go on further rows of it ("host→device 2"); what passes the
/// host without staying there is on both links. A step has the time stalled and the bytes moved from the session's
/// begin to its end. `otherData` has the budgets, how many events are missing at the beginning, and since when none is.
#pragma once

#include <ostream>

#include "memory/timeline_event.h"

namespace terrace {

/// The stream's state says whether it succeeded.
void write_trace(const TimelineSnapshot& timeline, std::ostream& out);

}  // namespace terrace
