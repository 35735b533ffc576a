/// Moves bytes between the tiers, asynchronously: a queue and a thread for each link.
///
/// A transfer is cut into blocks of a granule. Between neighbouring tiers a block crosses one link; between
/// device and NVMe two, through a staging block, so that while one block is on the first link another is on
/// the second. On each link the most urgent transfer goes first, and among equals the one started first.
///
/// Every transfer ends with exactly one call of its `done`: after all of its blocks have come to rest, with the first
/// error if there was one. What is not under way by then is not started any more.
///
/// A drive that does not answer an operation within `patience` is given up: what it has not answered ends as
/// Unanswered, and all that would follow fails. That is of the operations themselves: setting space aside and records
/// of what extents hold go by the file system's own calls, which take as long as the system makes them.
///
/// Threads: `hold_arena` and `let_go_of_arena` any but the service's own; `start`, `raise` and `cancel` may be called
/// from any thread, also from `done`. The destructor waits for everything that was started.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "offload/device.h"
#include "offload/host_arena.h"
#include "offload/io_engine.h"
#include "offload/nvme_store.h"
#include "offload/processors.h"
#include "offload/transfer.h"
#include "offload/transfer_board.h"

namespace terrace {

class TransferService {
 public:
  /// Staging blocks for each direction between device and NVMe, where nothing else is asked for, and the fewest.
  static constexpr std::size_t staging_blocks_each_way = 4;
  static constexpr std::size_t staging_blocks = 2 * staging_blocks_each_way;
  static constexpr std::size_t most_transfers = TransferBoard::most_transfers;
  using Moved = TransferBoard::Moved;
  /// For how long a drive may leave an operation without an answer: far longer than the system itself tries.
  static constexpr std::chrono::milliseconds default_patience = std::chrono::minutes(2);

  struct Options {
    TransferObserver* observer = nullptr;  ///< outlives the service
    /// Blocks that may be with the drives at once, each way; 0: by their size, as NvmeWorker::default_depth has it.
    std::size_t nvme_depth = 0;
    /// What comes from the device is with the drive in these only, and takes its turn among all that is read: its share
    /// of the drive is theirs of what is in flight.
    std::size_t staging_blocks_each_way = TransferService::staging_blocks_each_way;
    std::chrono::milliseconds patience = default_patience;
    Processors processors{};  ///< that its threads run on; those of an engine run where that was told
  };

  /// `store` and `engine` are null where there is no NVMe tier. All outlive the service. The staging blocks come from
  /// the arena, in whose budget the caller has counted them. Throws IoError if the engine cannot open its queues or the
  /// system starts no thread.
  TransferService(Device& device, HostArena& arena, NvmeStore* store, IoEngine* engine, const Options& options);
  TransferService(Device& device, HostArena& arena, NvmeStore* store, IoEngine* engine)
      : TransferService(device, arena, store, engine, Options{}) {}
  ~TransferService();
  TransferService(const TransferService&) = delete;
  TransferService& operator=(const TransferService&) = delete;

  /// Throws LogicError where nothing would move, or no link goes there, and beyond `most_transfers` whose
  /// `done` has not returned.
  TransferId start(TransferRequest request) { return board_.start(std::move(request)); }
  /// Makes a transfer at least as urgent as `priority`. Nothing if it has ended.
  void raise(TransferId id, TransferPriority priority) { board_.raise(id, priority); }
  /// Has a transfer of which nothing has started end with Cancelled, ahead of what waits. False, and nothing else,
  /// where it has started or ended.
  bool cancel(TransferId id) { return board_.cancel(id); }

  /// Has the kernel know the arena's memory, as far as it was ever used, so that transfers to and from NVMe need not
  /// fix it each time. The arena keeps that memory from now on. Nothing where that is more than
  /// `most_bytes`, or hardly more than it was.
  void hold_arena(std::uint64_t most_bytes);
  /// The contrary; returns when the arena can be trimmed again.
  void let_go_of_arena();

  /// Bytes of the transfers that have succeeded; of those, exactly, that ended by `at_ns`, if that is asked for.
  Moved moved(std::int64_t* at_ns = nullptr) const { return board_.moved(at_ns); }

 private:
  void keep_time(const std::stop_token& stop, std::chrono::nanoseconds tick);

  HostArena& arena_;
  const bool has_nvme_;
  TransferBoard board_;
  std::mutex hold_mutex_;
  std::size_t held_bytes_ = 0;  ///< of the arena; guarded by `hold_mutex_`
  std::mutex clock_mutex_;
  std::condition_variable_any clock_stops_;
  std::jthread clock_;  // last: it uses the board
};

}  // namespace terrace
