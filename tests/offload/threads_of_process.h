/// The threads of this process and where they may run, as the system shows them.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <sched.h>
#include <string>
#include <thread>

#include "offload/processors.h"

namespace terrace {

/// By the system's number of the thread.
inline std::map<int, Processors> threads_of_process() {
  std::map<int, Processors> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const int thread = std::stoi(entry.path().filename().string());
    cpu_set_t set;
    if (::sched_getaffinity(thread, sizeof set, &set) != 0) continue;  // it has ended meanwhile
    for (unsigned number = 0; number < CPU_SETSIZE; ++number) {
      if (CPU_ISSET(number, &set)) threads[thread].push_back(number);
    }
  }
  return threads;
}

/// Those that were not there `before`, as soon as all of them may run on `processors` only: threads bind themselves
/// when they begin. After a long while as they are.
inline std::map<int, Processors> new_threads(const std::map<int, Processors>& before, const Processors& processors) {
  const auto give_up_at = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (;;) {
    std::map<int, Processors> now = threads_of_process();
    for (const auto& each : before) now.erase(each.first);
    bool all_there = true;
    for (const auto& each : now) all_there = all_there && each.second == processors;
    if (all_there || std::chrono::steady_clock::now() > give_up_at) return now;
    std::this_thread::yield();
  }
}

}  // namespace terrace
