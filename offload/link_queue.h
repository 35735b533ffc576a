/// What waits for one link, the most urgent first; among equals, the transfer started first.
///
/// A transfer that goes on over a second link needs a staging block for each of its own. Where there is none left, it
/// is passed by those that need none.
///
/// Write-backs are not starved: after `most_urgent_in_a_row` blocks of what is more urgent, one of theirs is next.
/// (The worker of a drive may let as many pass once more, those that are ready for the drive.)
/// Those who want bytes now may wait for the room that a write-back makes. Blocks on their second link are not starved
/// either, by the same rule: they hold staging, which something more urgent may wait for on the first.
///
/// Not thread-safe: guarded by the board's mutex.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "offload/staging.h"
#include "offload/transfer_job.h"

namespace terrace {

class LinkQueue {
 public:
  static constexpr std::size_t most_urgent_in_a_row = 16;

  /// All blocks of a transfer, whose first link this is.
  void push(std::shared_ptr<TransferJob> job);
  /// A block whose second link this is.
  void push(TransferBlock block);

  /// The most urgent block that can start. One that needs staging takes it from `staging`, unless its transfer has
  /// failed: then it will not move.
  std::optional<TransferBlock> pop(Staging& staging);
  /// The same, of what is more urgent than that.
  std::optional<TransferBlock> pop_before(TransferPriority priority, Staging& staging);

  bool empty() const noexcept {
    return over_.empty() && !has_any(staged_) && !has_any(direct_) && !has_any(passed_on_);
  }

  /// The job's priority was `from`; what waits of it takes its place by the one it has now.
  void raise(const std::shared_ptr<TransferJob>& job, TransferPriority from);
  /// The job has failed before it began: what waits of it is next, as it moves nothing.
  void put_first(const std::shared_ptr<TransferJob>& job);

 private:
  using Turn = std::pair<TransferPriority, TransferId>;

  struct Waiting {
    std::shared_ptr<TransferJob> job;
    std::size_t next = 0;  ///< the first block that has not left the queue
  };
  using Jobs = std::map<TransferId, Waiting>;
  using Blocks = std::map<std::pair<TransferId, std::size_t>, TransferBlock>;
  template <class Queue>
  using ByPriority = std::array<Queue, transfer_priority_count>;

  template <class Queue>
  static bool has_any(const ByPriority<Queue>& queues) noexcept {
    return std::ranges::any_of(queues, [](const Queue& queue) { return !queue.empty(); });
  }
  bool has_write_back() const;
  bool has_turn_of_passed_on() const { return ahead_of_passed_on_ == most_urgent_in_a_row && has_any(passed_on_); }
  std::size_t count_passed_on() const;
  void note_passing(const TransferBlock& block, std::size_t passed_on_before);
  /// The most urgent that can start and is of one of these priorities.
  std::optional<TransferBlock> pop_between(TransferPriority first, TransferPriority last, Staging& staging);
  static TransferBlock take_first(Jobs& jobs);
  static TransferBlock take_first(Blocks& blocks);

  Jobs over_;                ///< will not move
  ByPriority<Jobs> staged_;  ///< need staging blocks
  ByPriority<Jobs> direct_;
  ByPriority<Blocks> passed_on_;        ///< on their second link
  std::size_t urgent_in_a_row_ = 0;     ///< blocks that have passed a write-back since one left
  std::size_t ahead_of_passed_on_ = 0;  ///< blocks that have passed one of `passed_on_` since one left
};

}  // namespace terrace
