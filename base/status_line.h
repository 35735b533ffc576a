/// A line at the end of standard error, on a terminal, that is written anew in its place: how far something is.
///
/// What is logged meanwhile goes above it. There is one in a process. Thread-safe, also while the process exits.
/// Nothing here throws: what cannot be shown is lost.
#pragma once

#include <string_view>

namespace terrace {

/// Shows `text`, which fits the width of the terminal, in the place of what was shown before.
void show_status_line(std::string_view text) noexcept;

/// Leaves the line as it stands: what is written from now on begins on a line of its own.
void end_status_line() noexcept;

/// Takes the line away and puts it back, for what else is written to standard error while this lives. One a thread.
class WithoutStatusLine {
 public:
  WithoutStatusLine() noexcept;
  ~WithoutStatusLine();
  WithoutStatusLine(const WithoutStatusLine&) = delete;
  WithoutStatusLine& operator=(const WithoutStatusLine&) = delete;
};

}  // namespace terrace
