/// Counts a pool of the program's against the device's budget: one that takes segments from the device, serves tensors
/// from them, and keeps what is freed, as LibTorch's allocator for a GPU does.
///
/// Counted, as `other`, is what the pool has reserved since this was made, and a little ahead of it. Before a call that
/// may make the pool grow, room is reserved for the most that it can grow by, which makes chunks leave; what it did not
/// grow by is given back when it is more than that little. Where chunks find no room, the pool gives back what it keeps
/// (see SpareRoom). So neither side starves, and the two together never exceed the budget.
///
/// A call that the pool is sure to serve from what it keeps reserves nothing. It is sure while one stream alone asks:
/// the largest block kept is then one that the call can have.
///
/// Thread-safe. Calls into the pool take turns; nobody waits for room while one runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "memory/access_stream.h"

namespace terrace {

class SegmentPool {
 public:
  virtual ~SegmentPool() = default;
  /// What the pool has taken from the device.
  virtual std::uint64_t reserved_bytes() = 0;
  /// The largest block that it keeps for requests to come.
  virtual std::uint64_t largest_kept_bytes() = 0;
  /// Gives segments in which nothing is used back to the device.
  virtual void give_back_kept() = 0;
};

/// A call into the pool for one block.
struct PoolCall {
  std::uint64_t most_growth = 0;        ///< what the pool can grow by
  std::uint64_t kept_block_needed = 0;  ///< a kept block from which it is sure to be served; 0: there is no knowing
  const void* stream = nullptr;         ///< on which the block is to be used
};

class PoolBudget final : public SpareRoom {
 public:
  /// `stream` asks this for spare room from now on. Both outlive this. `before_growth` is called, under no lock, when
  /// room has been reserved for the pool to take: what else of the device's memory is kept for reuse makes way. It does
  /// not throw.
  PoolBudget(
      AccessStream& stream, SegmentPool& pool, std::function<void()> before_growth = [] {});
  ~PoolBudget() override;
  PoolBudget(const PoolBudget&) = delete;
  PoolBudget& operator=(const PoolBudget&) = delete;

  /// Returns what `call_pool()` returns, with room for what the pool may grow by. Throws OutOfMemory where there is
  /// none.
  template <class CallPool>
  auto call(const PoolCall& what, CallPool&& call_pool) {
    for (std::uint64_t promised = 0;;) {
      std::unique_lock lock(mutex_);
      promised_ -= promised;
      promised = missing_for(what);
      if (promised == 0) {
        return std::forward<CallPool>(call_pool)();
      }
      lock.unlock();
      reserve(promised);
    }
  }

  /// The same without counting what the pool grows by.
  template <class CallPool>
  auto call_uncounted(CallPool&& call_pool) {
    const std::scoped_lock lock(mutex_);
    const std::uint64_t before = pool_.reserved_bytes();
    auto result = std::forward<CallPool>(call_pool)();
    uncounted_ += std::max(pool_.reserved_bytes(), before) - before;
    return result;
  }

  /// The most that is counted ahead of what the pool has reserved.
  static constexpr std::uint64_t most_ahead_bytes = 32 * 1024 * 1024;

  bool give_back() noexcept override;

 private:
  // Under the mutex.
  /// What has to be reserved before the call may be made; where that is nothing, the call is taken to be made.
  std::uint64_t missing_for(const PoolCall& what);
  /// Looks at what the pool has reserved, and gives back what is counted beyond `ahead_bytes` and what is promised.
  void look(std::uint64_t ahead_bytes);
  bool is_served_from_kept(const PoolCall& what);

  /// Promises that much more to the caller.
  void reserve(std::uint64_t bytes);

  AccessStream& stream_;
  SegmentPool& pool_;
  const std::function<void()> before_growth_;
  std::mutex mutex_;
  std::uint64_t uncounted_ = 0;      ///< what the pool had reserved before, and by uncounted calls
  std::uint64_t counted_ = 0;        ///< in the budget
  std::uint64_t promised_ = 0;       ///< of that, to calls that are about to be made
  std::uint64_t most_reserved_ = 0;  ///< at most so much has the pool reserved, of what is counted
  const void* only_stream_ = nullptr;
  bool any_stream_ = false;
  bool one_stream_ = true;
};

}  // namespace terrace
