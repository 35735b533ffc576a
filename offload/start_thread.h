#pragma once

#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "offload/errno_text.h"

namespace terrace {

/// A std::thread or std::jthread that does `work`. Throws IoError where the system has no thread to give; `attempt` are
/// the words for that: "nvme: starting threads for ...".
template <class Thread, class Work>
Thread start_thread(const std::string& attempt, Work&& work) {
  try {
    return Thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw IoError(attempt + " failed: " + errno_text(error.code().value()), "raise the limit on processes (ulimit -u)");
  }
}

}  // namespace terrace
