#include "integration/background_updates.h"

#include <thread>

#include <ATen/Parallel.h>

namespace terrace {

bool updates_run_in_background() {
  return at::get_num_threads() < static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace terrace
