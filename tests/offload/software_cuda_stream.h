/// Streams and events of CUDA's driver in software: what its handles point to.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace terrace {

/// One recording of an event: done when its stream has come to it.
class Mark {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  bool is_set() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

inline bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<const std::byte*> before;
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

}  // namespace terrace

struct CUevent_st {
 public:
  /// That of the latest recording; null before the first.
  std::shared_ptr<terrace::Mark> mark() {
    const std::lock_guard lock(mutex_);
    return latest_;
  }
  std::shared_ptr<terrace::Mark> record() {
    const std::lock_guard lock(mutex_);
    return latest_ = std::make_shared<terrace::Mark>();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<terrace::Mark> latest_;
};

/// A queue and the thread that works on it.
struct CUstream_st {
 public:
  using Range = std::span<const std::byte>;

  CUstream_st(std::chrono::microseconds longest_delay, std::uint64_t seed)
      : longest_delay_us_(static_cast<std::uint64_t>(longest_delay.count())),
        random_(seed),
        thread_([this] { work(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void issue(std::function<void()> run, std::vector<Range> touched) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(run), std::move(touched)});
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }
  bool touches(Range range) {
    const std::lock_guard lock(mutex_);
    return std::any_of(queue_.begin(), queue_.end(), [&](const Operation& operation) {
      return std::any_of(operation.touched.begin(), operation.touched.end(),
                         [&](Range touched) { return terrace::overlap(touched, range); });
    });
  }

 private:
  struct Operation {
    std::function<void()> run;
    std::vector<Range> touched;
  };

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Operation& first = queue_.front();  // stays there until it is done
      lock.unlock();
      if (longest_delay_us_ > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % (longest_delay_us_ + 1)));
      }
      first.run();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  const std::uint64_t longest_delay_us_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool stopping_ = false;
  std::thread thread_;
};
