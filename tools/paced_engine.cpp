#include "tools/paced_engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace terrace {
namespace {

class PacedQueue final : public IoQueue {
 public:
  PacedQueue(std::unique_ptr<IoQueue> queue, std::shared_ptr<EmulatedLink> pace)
      : pace_(std::move(pace)), operations_(queue->depth()), queue_(std::move(queue)) {
    for (Paced& each : operations_) free_.push_back(&each);
  }

  std::size_t depth() const noexcept override { return queue_->depth(); }
  std::size_t in_flight() const noexcept override { return operations_.size() - free_.size(); }

  void register_memory(std::span<const std::span<std::byte>> regions) override { queue_->register_memory(regions); }

  void submit(const IoOperation& operation) override {
    if (free_.empty()) {
      throw LogicError("io: " + std::to_string(operations_.size()) +
                       " operations are in flight, and no more fit the queue");
    }
    Paced* const paced = free_.back();
    *paced = {.owner = operation.owner, .due_ns = 0, .error = nullptr};
    IoOperation inner = operation;
    inner.owner = paced;
    queue_->submit(inner);
    paced->due_ns = pace_->carry(operation.bytes);
    free_.pop_back();
  }

  void wait(std::vector<IoCompletion>& done) override {
    const std::size_t before = done.size();
    for (;;) {
      poll(done);
      if (take_wake() || done.size() > before) return;
      if (!moved_.empty()) {
        sleep_until_due(std::ranges::min(moved_, {}, &Paced::due_ns)->due_ns);
      } else {
        queue_->wait(inner_done_);
        note_moved();
      }
    }
  }

  void poll(std::vector<IoCompletion>& done) override {
    queue_->poll(inner_done_);
    note_moved();
    const std::int64_t now_ns = monotonic_ns();
    std::erase_if(moved_, [&](Paced* paced) {
      if (paced->due_ns > now_ns) return false;
      done.push_back({.owner = paced->owner, .error = std::exchange(paced->error, nullptr)});
      free_.push_back(paced);
      return true;
    });
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_all();
    queue_->wake();
  }

 private:
  struct Paced {
    void* owner = nullptr;
    std::int64_t due_ns = 0;
    std::exception_ptr error;
  };

  void note_moved() {
    for (IoCompletion& completion : inner_done_) {
      auto* const paced = static_cast<Paced*>(completion.owner);
      paced->error = std::move(completion.error);
      moved_.push_back(paced);
    }
    inner_done_.clear();
  }

  bool take_wake() {
    const std::lock_guard lock(mutex_);
    return std::exchange(woken_, false);
  }

  void sleep_until_due(std::int64_t due_ns) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(due_ns - monotonic_ns()), [&] { return woken_; });
  }

  const std::shared_ptr<EmulatedLink> pace_;
  std::vector<Paced> operations_;
  std::vector<Paced*> free_;
  std::vector<Paced*> moved_;  ///< by the drive, and perhaps not due yet
  std::vector<IoCompletion> inner_done_;
  std::mutex mutex_;  // guards the next two
  bool woken_ = false;
  std::condition_variable changed_;
  const std::unique_ptr<IoQueue> queue_;  // last: what it has in flight ends before the rest goes
};

}  // namespace

PacedEngine::PacedEngine(std::unique_ptr<IoEngine> engine, std::uint64_t bytes_per_second)
    : engine_(std::move(engine)),
      pace_(std::make_shared<EmulatedLink>(LinkSpeed{.bytes_per_second = bytes_per_second})) {}

std::unique_ptr<IoQueue> PacedEngine::open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered,
                                                 std::span<const IoFile* const> files) {
  return std::make_unique<PacedQueue>(engine_->open_queue(depth, registered, files), pace_);
}

}  // namespace terrace
