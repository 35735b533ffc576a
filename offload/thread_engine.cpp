#include "offload/thread_engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include "base/error.h"
#include "offload/io_progress.h"
#include "offload/start_thread.h"

namespace terrace {
namespace {

constexpr std::size_t kMostThreads = 8;

class ThreadQueue : public IoQueue {
 public:
  ThreadQueue(std::size_t depth, const Processors& processors) : depth_(depth) {
    completed_.reserve(depth);  // a thread that has done its work must be able to say so
    for (std::size_t i = 0; i < std::min(depth, kMostThreads); ++i) {
      threads_.push_back(start_thread<std::jthread>("nvme: starting threads for input and output", processors,
                                                    [this](const std::stop_token& stop) { run(stop); }));
    }
  }

  std::size_t depth() const noexcept override { return depth_; }
  std::size_t in_flight() const noexcept override { return in_flight_; }

  void register_memory(std::span<const std::span<std::byte>>) override {}

  void submit(const IoOperation& operation) override {
    if (in_flight_ == depth_) {
      throw LogicError("nvme: an operation beyond the " + std::to_string(depth_) + " that a queue holds");
    }
    {
      const std::lock_guard lock(mutex_);
      pending_.emplace_back(operation);
    }
    ++in_flight_;
    has_work_.notify_one();
  }

  void wait(std::vector<IoCompletion>& done) override {
    std::unique_lock lock(mutex_);
    has_news_.wait(lock, [&] { return !completed_.empty() || woken_; });
    woken_ = false;
    hand_over(lock, done);
  }

  void poll(std::vector<IoCompletion>& done) override {
    std::unique_lock lock(mutex_);
    hand_over(lock, done);
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    has_news_.notify_one();
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    // True while there is work, also when told to stop: what was submitted is carried out.
    while (has_work_.wait(lock, stop, [&] { return !pending_.empty(); })) {
      IoProgress transfer = pending_.front();
      pending_.pop_front();
      lock.unlock();
      run_here(transfer);
      lock.lock();
      completed_.push_back(transfer.completion());
      has_news_.notify_one();
    }
  }

  void hand_over(std::unique_lock<std::mutex>&, std::vector<IoCompletion>& done) {
    done.insert(done.end(), completed_.begin(), completed_.end());
    in_flight_ -= completed_.size();
    completed_.clear();
  }

  const std::size_t depth_;
  std::size_t in_flight_ = 0;  // of the thread that uses the queue

  std::mutex mutex_;
  std::condition_variable_any has_work_;
  std::condition_variable has_news_;
  std::deque<IoProgress> pending_;
  std::vector<IoCompletion> completed_;
  bool woken_ = false;

  std::vector<std::jthread> threads_;  // last: they end before what they use
};

}  // namespace

std::unique_ptr<IoQueue> ThreadEngine::open_queue(std::size_t depth, std::span<const std::span<std::byte>>,
                                                  std::span<const IoFile* const>) {
  if (depth == 0) throw LogicError("nvme: a queue needs a depth of at least 1");
  return std::make_unique<ThreadQueue>(depth, processors_);
}

}  // namespace terrace
