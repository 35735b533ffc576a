/// An engine that does wrong on purpose: the only one, for the tests of every floor.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "offload/io_error.h"
#include "tests/offload/aligned_bytes.h"

namespace terrace {

enum class Fault : std::uint8_t {
  io_error,        // EIO; nothing moves
  no_space,        // ENOSPC; nothing moves
  short_transfer,  // half of it moves, in whole pages, and then it fails
  flipped_bit,     // one bit of what is read or written is wrong, and nobody says so
  late,            // it completes after something submitted later, where there is such
  torn,            // half of it moves, in whole pages, and nobody says so
  slow,            // it completes only after a while
  stuck,           // it moves, and is never completed
  dead_queue,      // its queue throws from now on
};

/// Which operations a fault happens to: those that meet every condition.
struct FaultRule {
  Fault fault = Fault::io_error;
  std::optional<IoOperation::Direction> direction = std::nullopt;
  std::optional<std::uint64_t> nth = std::nullopt;         // among the operations of its own direction, from 0
  std::function<bool(const IoOperation&)> when = nullptr;  // called in order of submission, one at a time
  double probability = 1;
};

/// A fault that happened, and to what.
struct InjectedFault {
  Fault fault;
  IoOperation::Direction direction;
  std::string path;
  std::uint64_t offset;
  std::size_t bytes;
};

/// Passes operations on to a real engine, except where a rule says otherwise; the first rule that applies wins.
/// Outlives its queues. Thread-safe, but for `before_write`, which is set while nothing is in flight.
class FaultInjectingEngine : public IoEngine {
 public:
  using Direction = IoOperation::Direction;

  explicit FaultInjectingEngine(std::unique_ptr<IoEngine> engine, std::uint64_t seed = 1)
      : engine_(std::move(engine)), random_(seed) {}

  std::string_view name() const noexcept override { return "fault_injecting"; }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered = {},
                                      std::span<const IoFile* const> files = {}) override;

  void inject(FaultRule rule) {
    const std::lock_guard lock(mutex_);
    rules_.push_back(std::move(rule));
  }
  void heal() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
  }
  /// The faults of rules that have happened so far.
  std::vector<InjectedFault> injected() const {
    const std::lock_guard lock(mutex_);
    return injected_;
  }

  /// Operations of a direction that were submitted so far.
  std::uint64_t seen(Direction direction) const { return seen_[index_of(direction)]; }
  /// So many of the next operations are tried on a file that is not open.
  std::atomic<int> failing_reads{0};
  std::atomic<int> failing_writes{0};
  /// Called by the submitting thread, before it is decided what becomes of the write.
  std::function<void(std::uint64_t offset)> before_write;

  /// From now on writes are held back, but for as many as are let through.
  void hold_writes() { writes_allowed_ = 0; }
  void let_through(int writes) {
    writes_allowed_ += writes;
    const std::lock_guard lock(mutex_);
    for (IoQueue* queue : queues_) queue->wake();
  }

 private:
  class Queue;

  static std::size_t index_of(Direction direction) { return direction == Direction::read ? 0 : 1; }

  std::optional<Fault> fault_for(const IoOperation& operation) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t ordinal = seen_[index_of(operation.direction)]++;
    for (const FaultRule& rule : rules_) {
      if (rule.direction && *rule.direction != operation.direction) continue;
      if (rule.nth && *rule.nth != ordinal) continue;
      if (rule.when && !rule.when(operation)) continue;
      if (std::uniform_real_distribution<>()(random_) < rule.probability) {
        injected_.push_back(
            {rule.fault, operation.direction, operation.file->path.string(), operation.offset, operation.bytes});
        return rule.fault;
      }
    }
    return std::nullopt;
  }

  static bool take_one(std::atomic<int>& left) {
    int seen = left.load();
    while (seen > 0 && !left.compare_exchange_weak(seen, seen - 1)) {
    }
    return seen > 0;
  }

  template <class Use>
  void with_random(Use use) {
    const std::lock_guard lock(mutex_);
    use(random_);
  }
  /// In the first half: at the end of a last block there may be bytes that nobody needs.
  void flip_a_bit(std::byte* memory, std::size_t bytes) {
    with_random([&](std::mt19937_64& random) {
      const std::uint64_t bit = random() % (bytes * 4);
      memory[bit / 8] ^= std::byte{1} << (bit % 8);
    });
  }

  const std::unique_ptr<IoEngine> engine_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<FaultRule> rules_;
  std::vector<InjectedFault> injected_;
  std::vector<IoQueue*> queues_;
  std::array<std::atomic<std::uint64_t>, 2> seen_{};
  std::atomic<int> writes_allowed_{std::numeric_limits<int>::max() / 2};
};

class FaultInjectingEngine::Queue : public IoQueue {
 public:
  Queue(FaultInjectingEngine& engine, std::unique_ptr<IoQueue> queue) : engine_(engine), queue_(std::move(queue)) {
    const std::lock_guard lock(engine_.mutex_);
    engine_.queues_.push_back(this);
  }
  ~Queue() override {
    const std::lock_guard lock(engine_.mutex_);
    std::erase(engine_.queues_, this);
  }

  std::size_t depth() const noexcept override { return queue_->depth(); }
  std::size_t in_flight() const noexcept override { return flights_.size(); }

  void register_memory(std::span<const std::span<std::byte>> regions) override { queue_->register_memory(regions); }

  void submit(const IoOperation& operation) override {
    if (in_flight() == depth()) throw LogicError("nvme: an operation beyond the depth of a queue");
    if (operation.direction == Direction::write && engine_.before_write) engine_.before_write(operation.offset);
    auto owned = std::make_unique<Flight>(Flight{operation, engine_.fault_for(operation), {}, {}});
    Flight& flight = *owned;
    flights_.emplace(&flight, std::move(owned));

    IoOperation passed = operation;
    passed.owner = &flight;
    if (flight.fault == Fault::io_error || flight.fault == Fault::no_space) {
      const int error_number = flight.fault == Fault::io_error ? EIO : ENOSPC;
      over_.push_back({&flight, std::make_exception_ptr(transfer_failed(operation, error_number))});
      return;
    }
    if (flight.fault == Fault::dead_queue) dead_ = true;
    if (flight.fault == Fault::short_transfer || flight.fault == Fault::torn) passed.bytes = half(operation.bytes);
    const bool writes = operation.direction == Direction::write;
    if (flight.fault == Fault::flipped_bit && writes && operation.bytes > 0) {
      flight.wrong.assign(operation.memory, operation.memory + operation.bytes);
      engine_.flip_a_bit(flight.wrong.data(), flight.wrong.size());
      passed.memory = flight.wrong.data();
    }
    if (take_one(writes ? engine_.failing_writes : engine_.failing_reads)) {
      flight.nowhere = {-1, operation.file->path};
      passed.file = &flight.nowhere;
    }
    if (writes && !take_one(engine_.writes_allowed_)) {
      held_.push_back(passed);
    } else {
      queue_->submit(passed);
    }
  }

  void wait(std::vector<IoCompletion>& done) override {
    // The queue below takes a wake-up for itself even if all that it has completed is held back here.
    for (;;) {
      throw_if_dead();
      const bool woken = woken_.exchange(false);
      submit_held();
      if (over_.empty() && !woken && !slow_.empty()) {
        std::this_thread::sleep_until(slow_.front().first);
        queue_->poll(batch_);
      } else if (over_.empty() && !woken) {
        queue_->wait(batch_);
      } else {
        queue_->poll(batch_);
      }
      if (hand_over(done) || woken || woken_.exchange(false)) return;
    }
  }

  void poll(std::vector<IoCompletion>& done) override {
    throw_if_dead();
    submit_held();
    queue_->poll(batch_);
    hand_over(done);
  }

  void wake() noexcept override {
    woken_ = true;
    queue_->wake();
  }

 private:
  struct Flight {
    IoOperation operation;
    std::optional<Fault> fault;
    IoFile nowhere;
    AlignedBytes wrong;
  };

  using Clock = std::chrono::steady_clock;
  static constexpr auto slowness = std::chrono::milliseconds(2);

  void throw_if_dead() const {
    if (dead_) throw IoError("nvme: the queue is dead");
  }

  static std::size_t half(std::size_t bytes) { return bytes / 2 / 4096 * 4096; }

  void submit_held() {
    while (!held_.empty() && take_one(engine_.writes_allowed_)) {
      queue_->submit(held_.front());
      held_.erase(held_.begin());
    }
  }

  bool hand_over(std::vector<IoCompletion>& done) {
    for (const IoCompletion& completion : batch_) {
      const std::optional<Fault> fault = static_cast<Flight*>(completion.owner)->fault;
      if (fault == Fault::stuck) continue;
      if (fault == Fault::slow) {
        slow_.emplace_back(Clock::now() + slowness, completion);
      } else {
        (fault == Fault::late ? late_ : over_).push_back(completion);
      }
    }
    batch_.clear();
    for (; !slow_.empty() && slow_.front().first <= Clock::now(); slow_.pop_front()) {
      over_.push_back(slow_.front().second);
    }
    if (!over_.empty() || queue_->in_flight() == 0) {
      engine_.with_random([&](std::mt19937_64& random) { std::shuffle(late_.begin(), late_.end(), random); });
      over_.insert(over_.end(), late_.begin(), late_.end());
      late_.clear();
    }
    const bool any = !over_.empty();
    for (const IoCompletion& completion : over_) {
      const Flight& flight = *static_cast<Flight*>(completion.owner);
      done.push_back({flight.operation.owner, completion.error ? completion.error : error_of(flight)});
      flights_.erase(&flight);
    }
    over_.clear();
    return any;
  }

  /// What an operation that went well is said to have met.
  std::exception_ptr error_of(const Flight& flight) {
    const IoOperation& operation = flight.operation;
    const bool reads = operation.direction == Direction::read;
    if (flight.fault == Fault::flipped_bit && reads && operation.bytes > 0) {
      engine_.flip_a_bit(operation.memory, operation.bytes);
    }
    if (flight.fault != Fault::short_transfer) return nullptr;
    const std::size_t moved = half(operation.bytes);
    return std::make_exception_ptr(reads ? end_of_file(operation, moved) : nothing_taken(operation, moved));
  }

  FaultInjectingEngine& engine_;
  std::unordered_map<const void*, std::unique_ptr<Flight>> flights_;
  std::vector<IoCompletion> batch_, over_, late_;                // owners are flights
  std::vector<IoOperation> held_;                                // so are theirs
  std::deque<std::pair<Clock::time_point, IoCompletion>> slow_;  // and theirs; when each is due
  bool dead_ = false;
  std::atomic<bool> woken_{false};
  std::unique_ptr<IoQueue> queue_;  // last: it ends before the memory it uses
};

inline std::unique_ptr<IoQueue> FaultInjectingEngine::open_queue(std::size_t depth,
                                                                 std::span<const std::span<std::byte>> registered,
                                                                 std::span<const IoFile* const> files) {
  return std::make_unique<Queue>(*this, engine_->open_queue(depth, registered, files));
}

}  // namespace terrace
