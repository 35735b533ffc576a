#include "base/log.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include "base/status_line.h"

namespace terrace {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"trace", "debug", "info", "warning", "error", "off"};

std::atomic<LogLevel> current_level{LogLevel::info};

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::trace:
      return spdlog::level::trace;
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

/// A logger of our own, not registered with spdlog, so that a program's settings of spdlog and ours stay apart.
struct Log {
  Log() {
    logger.set_level(spdlog::level::trace);
    logger.set_pattern("%H:%M:%S.%e terrace %^%l%$: %v");
    const char* const no_colour = std::getenv("NO_COLOR");  // no-color.org
    if (no_colour != nullptr && *no_colour != '\0') sink->set_color_mode(spdlog::color_mode::never);
  }

  const std::shared_ptr<spdlog::sinks::stderr_color_sink_mt> sink =
      std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  spdlog::logger logger{"terrace", sink};
  std::mutex mutex;
  std::set<std::string, std::less<>> logged_keys;
};

Log& instance() {
  static Log* const log = std::make_unique<Log>().release();  // never destroyed: destructors at exit may log
  return *log;
}

}  // namespace

void log(LogLevel level, std::string_view text) noexcept {
  if (!log_enabled(level)) return;
  try {
    const WithoutStatusLine without_status_line;
    instance().logger.log(spdlog_level(level), spdlog::string_view_t(text.data(), text.size()));
  } catch (...) {  // NOLINT(bugprone-empty-catch): the header says so
  }
}

void log_once(std::string_view key, LogLevel level, std::string_view text) noexcept {
  if (!log_enabled(level)) return;
  try {
    Log& state = instance();
    {
      const std::lock_guard lock(state.mutex);
      if (!state.logged_keys.emplace(key).second) return;
    }
    log(level, text);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the header says so
  }
}

void set_log_level(LogLevel level) noexcept { current_level.store(level, std::memory_order_relaxed); }

LogLevel log_level() noexcept { return current_level.load(std::memory_order_relaxed); }

bool log_enabled(LogLevel level) noexcept { return level != LogLevel::off && level >= log_level(); }

std::string_view log_level_name(LogLevel level) noexcept { return kNames[static_cast<std::size_t>(level)]; }

std::optional<LogLevel> log_level_from_name(std::string_view name) noexcept {
  for (std::size_t index = 0; index < kNames.size(); ++index) {
    if (kNames[index] == name) return static_cast<LogLevel>(index);
  }
  return std::nullopt;
}

}  // namespace terrace
