#pragma once

#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "offload/errno_text.h"
#include "offload/processors.h"

namespace terrace {

/// A std::thread or std::jthread that does `work` on these hardware threads. Throws IoError where the system has no
/// thread to give; `attempt` are the words for that: "nvme: starting threads for ...".
template <class Thread, class Work>
Thread start_thread(const std::string& attempt, const Processors& processors, Work&& work) {
  try {
    return Thread([processors, work = std::forward<Work>(work)](auto... stop_token) -> void {
      bind_this_thread(processors);
      work(stop_token...);
    });
  } catch (const std::system_error& error) {
    throw IoError(attempt + " failed: " + errno_text(error.code().value()), "raise the limit on processes (ulimit -u)");
  }
}

}  // namespace terrace
