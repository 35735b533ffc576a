#include "base/fallback.h"

#include <algorithm>
#include <mutex>

namespace terrace {
namespace {

struct Noted {
  std::mutex mutex;
  std::vector<Fallback> fallbacks;
};

/// Never destroyed: threads may note something while the process exits.
Noted& noted() {
  static auto& all = *new Noted;
  return all;
}

}  // namespace

void note_fallback(std::string_view what, std::string_view reason, LogLevel level) noexcept {
  try {
    {
      Noted& all = noted();
      const std::lock_guard lock(all.mutex);
      const bool is_known = std::any_of(all.fallbacks.begin(), all.fallbacks.end(),
                                        [&](const Fallback& fallback) { return fallback.what == what; });
      if (is_known) {
        return;
      }
      all.fallbacks.push_back({std::string(what), std::string(reason)});
    }
    log(level, std::string(what) + ", because " + std::string(reason));
  } catch (...) {
    // Without memory for it there is nobody to tell.
  }
}

std::vector<Fallback> noted_fallbacks() {
  Noted& all = noted();
  const std::lock_guard lock(all.mutex);
  return all.fallbacks;
}

}  // namespace terrace
