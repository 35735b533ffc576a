#include "offload/thread_engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "offload/file_io.h"

namespace terrace {
namespace {

constexpr std::size_t most_threads = 4;

class ThreadQueue final : public IoQueue {
 public:
  explicit ThreadQueue(std::size_t depth) : depth_(depth) {
    for (std::size_t i = 0; i < std::min(depth, most_threads); ++i) {
      threads_.emplace_back([this] { work(); });
    }
  }

  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    submitted_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  std::size_t depth() const noexcept override { return depth_; }
  std::size_t in_flight() const noexcept override { return in_flight_; }

  void submit(const IoOperation& operation) override {
    if (in_flight_ == depth_) {
      throw LogicError("io: more than " + std::to_string(depth_) + " operations at once");
    }
    ++in_flight_;
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(operation);
    }
    submitted_.notify_one();
  }

  void wait(std::vector<IoCompletion>& completions) override {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [&] { return !done_.empty() || woken_; });
    woken_ = false;
    take(completions);
  }

  void poll(std::vector<IoCompletion>& completions) override {
    const std::lock_guard lock(mutex_);
    take(completions);
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    completed_.notify_one();
  }

 private:
  void take(std::vector<IoCompletion>& completions) {
    in_flight_ -= done_.size();
    std::move(done_.begin(), done_.end(), std::back_inserter(completions));
    done_.clear();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      submitted_.wait(lock, [&] { return !waiting_.empty() || stopping_; });
      if (waiting_.empty()) {
        return;
      }
      const IoOperation operation = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      IoCompletion completion{.owner = operation.owner, .error = nullptr};
      try {
        run_io(operation);
      } catch (...) {
        completion.error = std::current_exception();
      }
      lock.lock();
      done_.push_back(std::move(completion));
      completed_.notify_one();
    }
  }

  const std::size_t depth_;
  std::size_t in_flight_ = 0;  // of the owner's thread
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable completed_;
  std::deque<IoOperation> waiting_;
  std::vector<IoCompletion> done_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> ThreadEngine::open_queue(std::size_t depth, std::span<const std::span<std::byte>>) {
  return std::make_unique<ThreadQueue>(depth);
}

}  // namespace terrace
