#include "integration/background_updates.h"

#include <thread>

#include <ATen/Parallel.h>

namespace terrace {

namespace {

int cores() { return static_cast<int>(std::thread::hardware_concurrency()); }

}  // namespace

bool updates_run_in_background() { return at::get_num_threads() < cores(); }

int update_thread_count() {
  return updates_run_in_background() ? cores() - at::get_num_threads() : at::get_num_threads();
}

}  // namespace terrace
