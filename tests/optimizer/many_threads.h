/// More threads than there are cores, for tests of what their number must not change.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <set>
#include <thread>

#include <oneapi/tbb/global_control.h>

namespace terrace {

inline constexpr int many_threads = 8;

/// While it lives, oneTBB runs so many threads, however few cores there are. What UpdateThreads has is fixed when it is
/// made.
class ManyThreads {
  oneapi::tbb::global_control control_{oneapi::tbb::global_control::max_allowed_parallelism, many_threads};
};

/// Keeps whoever comes until so many threads have come, or one has waited for long: which threads take parts is
/// oneTBB's choice, and the first to come would else take them all.
class Meeting {
 public:
  explicit Meeting(int threads = 2) : wanted_(static_cast<std::size_t>(threads)) {}

  void come() {
    std::unique_lock lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return threads_.size() >= wanted_; });
  }
  /// Once nobody comes any more.
  int size() const { return static_cast<int>(threads_.size()); }

 private:
  const std::size_t wanted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::thread::id> threads_;
};

}  // namespace terrace
