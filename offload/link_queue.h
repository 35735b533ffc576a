/// The blocks that wait for one link, the most urgent first; among equals, the transfer started first.
///
/// A block that goes on over a second link needs staging. Where there is none left, it is passed by those that
/// need none.
///
/// Not thread-safe: guarded by the board's mutex.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "offload/staging.h"
#include "offload/transfer_job.h"

namespace terrace {

class LinkQueue {
 public:
  void push(TransferBlock block);

  /// The most urgent block that can start. One that needs staging takes it from `staging`, unless its transfer has
  /// failed: then it will not move.
  std::optional<TransferBlock> pop(Staging& staging);

  /// The job's priority was `from`; its blocks take their places by the one it has now.
  void raise(const std::shared_ptr<TransferJob>& job, TransferPriority from);

 private:
  using Key = std::tuple<TransferPriority, TransferId, std::size_t>;
  using Blocks = std::map<Key, TransferBlock>;

  static TransferBlock take_first(Blocks& blocks);

  Blocks staged_;  // need a staging block
  Blocks direct_;
};

}  // namespace terrace
