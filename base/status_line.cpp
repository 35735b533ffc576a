#include "base/status_line.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

namespace terrace {
namespace {

constexpr std::string_view kClear = "\r\x1b[K";

struct StatusLine {
  std::mutex mutex;
  std::string text;  // empty: there is none
};

StatusLine& instance() {
  static StatusLine* const line = std::make_unique<StatusLine>().release();  // never destroyed: see log.cpp
  return *line;
}

/// At once, so that the terminal shows no state between.
void write(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

void show_status_line(std::string_view text) noexcept {
  try {
    StatusLine& line = instance();
    const std::lock_guard lock(line.mutex);
    line.text = text;
    write(std::string(kClear) + line.text);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the header says so
  }
}

void end_status_line() noexcept {
  StatusLine& line = instance();
  const std::lock_guard lock(line.mutex);
  if (!line.text.empty()) write("\n");
  line.text.clear();
}

WithoutStatusLine::WithoutStatusLine() noexcept {
  StatusLine& line = instance();
  line.mutex.lock();
  if (!line.text.empty()) write(kClear);
}

WithoutStatusLine::~WithoutStatusLine() {
  StatusLine& line = instance();
  if (!line.text.empty()) write(line.text);
  line.mutex.unlock();
}

}  // namespace terrace
