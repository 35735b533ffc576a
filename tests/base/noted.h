/// What was noted of a fallback, for tests that provoke it.
#pragma once

#include <string>
#include <string_view>

#include "base/fallback.h"

namespace terrace {

/// "what, because reason" of the last one in whose `what` the words occur; empty where there is none.
inline std::string noted(std::string_view words) {
  std::string found;
  for (const Fallback& fallback : noted_fallbacks()) {
    if (fallback.what.find(words) != std::string::npos) found = fallback.what + ", because " + fallback.reason;
  }
  return found;
}

}  // namespace terrace
