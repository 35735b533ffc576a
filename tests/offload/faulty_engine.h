/// An engine that carries operations out by another one, but for the faults that it is told to inject.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "offload/io_engine.h"
#include "offload/io_error.h"

namespace terrace {

class FaultyEngine final : public IoEngine {
 public:
  enum class Fault : std::uint8_t { none, eio, enospc, short_transfer, flipped_bit };
  using Direction = IoOperation::Direction;

  explicit FaultyEngine(std::unique_ptr<IoEngine> engine) : engine_(std::move(engine)) {}

  /// That many of the next operations fail with EIO.
  std::atomic<int> failing_reads{0};
  std::atomic<int> failing_writes{0};
  /// Called before each write, on the queue's thread.
  std::function<void(std::uint64_t offset)> before_write = [](std::uint64_t) {};
  /// Which fault befalls the `number`-th operation, from 0, of its direction. Called on the queues' threads.
  std::function<Fault(Direction direction, std::uint64_t number)> choose = [](Direction, std::uint64_t) {
    return Fault::none;
  };

  /// From now on writes are held back, but for as many as are let through.
  void hold_writes() { writes_allowed_ = 0; }
  void let_through(int writes) {
    writes_allowed_ += writes;
    const std::lock_guard lock(mutex_);
    for (IoQueue* queue : queues_) queue->wake();
  }

  std::uint64_t seen(Direction direction) const { return seen_[direction == Direction::read ? 0 : 1]; }

  std::string_view name() const noexcept override { return engine_->name(); }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered) override {
    return std::make_unique<Queue>(*this, engine_->open_queue(depth, registered));
  }

 private:
  class Queue final : public IoQueue {
   public:
    Queue(FaultyEngine& faults, std::unique_ptr<IoQueue> queue) : faults_(faults), queue_(std::move(queue)) {
      const std::lock_guard lock(faults_.mutex_);
      faults_.queues_.push_back(queue_.get());
    }
    ~Queue() override {
      const std::lock_guard lock(faults_.mutex_);
      std::erase(faults_.queues_, queue_.get());
    }

    std::size_t depth() const noexcept override { return queue_->depth(); }
    std::size_t in_flight() const noexcept override { return queue_->in_flight() + failed_.size() + held_.size(); }

    void submit(const IoOperation& operation) override {
      const bool reads = operation.direction == Direction::read;
      if (!reads) faults_.before_write(operation.offset);
      const std::uint64_t number = faults_.seen_[reads ? 0 : 1].fetch_add(1);
      Fault fault = faults_.choose(operation.direction, number);
      if (take_one(reads ? faults_.failing_reads : faults_.failing_writes)) fault = Fault::eio;
      const auto fail = [&](const IoError& error) {
        failed_.push_back({operation.owner, std::make_exception_ptr(error)});
        queue_->wake();
      };
      switch (fault) {
        case Fault::eio:
          return fail(transfer_failed(operation, EIO));
        case Fault::enospc:
          return fail(transfer_failed(operation, ENOSPC));
        case Fault::short_transfer:
          return fail(reads ? end_of_file(operation, operation.bytes / 2)
                            : nothing_taken(operation, operation.bytes / 2));
        case Fault::flipped_bit:
          if (reads) {
            flips_.push_back(operation);
          } else {
            operation.memory[operation.bytes / 2] ^= std::byte{0x10};
          }
          break;
        case Fault::none:
          break;
      }
      if (!reads && !take_one(faults_.writes_allowed_)) {
        held_.push_back(operation);
      } else {
        queue_->submit(operation);
      }
    }

    void wait(std::vector<IoCompletion>& completions) override {
      const std::size_t before = completions.size();
      queue_->wait(completions);
      settle(completions, before);
    }
    void poll(std::vector<IoCompletion>& completions) override {
      const std::size_t before = completions.size();
      queue_->poll(completions);
      settle(completions, before);
    }
    void wake() noexcept override { queue_->wake(); }

   private:
    static bool take_one(std::atomic<int>& left) {
      int seen = left.load();
      while (seen > 0 && !left.compare_exchange_weak(seen, seen - 1)) {
      }
      return seen > 0;
    }

    void settle(std::vector<IoCompletion>& completions, std::size_t first) {
      while (!held_.empty() && take_one(faults_.writes_allowed_)) {
        queue_->submit(held_.front());
        held_.erase(held_.begin());
      }
      for (std::size_t i = first; i < completions.size(); ++i) {
        for (auto flip = flips_.begin(); flip != flips_.end(); ++flip) {
          if (flip->owner == completions[i].owner) {
            flip->memory[flip->bytes / 2] ^= std::byte{0x10};
            flips_.erase(flip);
            break;
          }
        }
      }
      completions.insert(completions.end(), failed_.begin(), failed_.end());
      failed_.clear();
    }

    FaultyEngine& faults_;
    const std::unique_ptr<IoQueue> queue_;
    std::vector<IoCompletion> failed_;
    std::vector<IoOperation> held_;
    std::vector<IoOperation> flips_;  // reads that will not bring what is on the drive
  };

  const std::unique_ptr<IoEngine> engine_;
  std::array<std::atomic<std::uint64_t>, 2> seen_{};
  std::atomic<int> writes_allowed_{std::numeric_limits<int>::max() / 2};
  std::mutex mutex_;
  std::vector<IoQueue*> queues_;
};

}  // namespace terrace
