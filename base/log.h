/// The log: one line an event, on standard error, above the status line where there is one.
///
/// A message is logged as it stands; braces in it mean nothing. Levels below the current one, `info` unless set, are
/// dropped. Thread-safe, also while the process exits. Nothing here throws: what cannot be logged is lost.
/// The library behind it stays out of this header, because LibTorch brings a conflicting copy.
#pragma once

#include <optional>
#include <string_view>

namespace terrace {

enum class LogLevel { trace, debug, info, warning, error, off };

void log(LogLevel level, std::string_view text) noexcept;

/// Logs `text` the first time it is called with this `key`, for what happens often and needs saying once. A call whose
/// level is dropped does not count as the first.
void log_once(std::string_view key, LogLevel level, std::string_view text) noexcept;

void set_log_level(LogLevel level) noexcept;
LogLevel log_level() noexcept;

/// Whether a message of this level would be logged, for messages that are costly to make.
bool log_enabled(LogLevel level) noexcept;

/// "trace", "debug", "info", "warning", "error" or "off".
std::string_view log_level_name(LogLevel level) noexcept;
std::optional<LogLevel> log_level_from_name(std::string_view name) noexcept;

}  // namespace terrace
