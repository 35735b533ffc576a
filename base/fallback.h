/// What works otherwise than it was meant to, because the machine or the build lacks something: never silently.
///
/// Each is logged the first time it is noted, and kept for `terrace inspect` and whoever else asks. Thread-safe, and
/// nothing here throws: what cannot be kept is lost.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"

namespace terrace {

struct Fallback {
  std::string what;    ///< as it is now: "nvme: threads read and write"
  std::string reason;  ///< why: "io_uring is not available: ..."
};

/// One that was noted before, by the same `what`, stays as it is and is not logged again. The log reads "what, because
/// reason".
void note_fallback(std::string_view what, std::string_view reason, LogLevel level = LogLevel::warning) noexcept;

/// Those noted so far, in that order.
std::vector<Fallback> noted_fallbacks();

}  // namespace terrace
