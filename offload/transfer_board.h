/// What the workers of the transfer service share: who waits for which link, the staging blocks, and how far each
/// transfer is.
///
/// Threads: each link has a worker with a thread of its own. All functions may be called from any of them, and
/// `start`, `raise`, `cancel` and `wait_until_idle` from any thread at all. One mutex guards everything that changes;
/// it is never held across a copy, I/O or a callback.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offload/link_queue.h"
#include "offload/staging.h"
#include "offload/tier.h"
#include "offload/transfer.h"
#include "offload/transfer_job.h"

namespace terrace {

/// The thread of a link. Takes blocks from the board until it is told to stop and nothing is under way.
class LinkWorker {
 public:
  virtual ~LinkWorker() = default;
  /// There may be something to do. From any thread.
  virtual void wake() noexcept = 0;
  /// Time has passed. From any thread.
  virtual void tick() noexcept {}
  /// Waits for the thread's end.
  virtual void join() = 0;
};

class TransferBoard {
 public:
  using Lock = std::unique_lock<std::mutex>;
  /// Bytes by link and kind.
  using Moved = std::array<std::array<std::uint64_t, kind_count>, link_count>;
  static constexpr std::size_t most_transfers = 4096;  ///< whose `done` has not returned

  TransferBoard(HostArena& arena, std::size_t staging_blocks_each_way, TransferObserver* observer);
  /// Stops and joins the workers. Nothing may be under way any more.
  ~TransferBoard();
  TransferBoard(const TransferBoard&) = delete;
  TransferBoard& operator=(const TransferBoard&) = delete;

  /// Before the first transfer is started.
  void set_worker(Link link, std::unique_ptr<LinkWorker> worker) { workers_[index_of(link)] = std::move(worker); }

  TransferId start(TransferRequest request);
  void raise(TransferId id, TransferPriority priority);
  bool cancel(TransferId id);
  void wait_until_idle();
  void tick() noexcept;
  /// Bytes of the transfers that have succeeded; of those, exactly, that ended by `at_ns`, if that is asked for.
  Moved moved(std::int64_t* at_ns = nullptr) const;

  std::size_t block_bytes() const noexcept { return block_bytes_; }
  /// What queues to and from NVMe have registered besides the staging blocks, from their next turn on: parts of the
  /// arena, which keeps their memory. Returns at once.
  void register_memory(std::vector<std::span<std::byte>> parts);
  /// Nothing besides the staging blocks; returns when no queue has anything else.
  void register_nothing();

  // ---- For the workers

  struct Registration {
    std::vector<std::span<std::byte>> memory;
    std::uint64_t number = 0;  ///< goes up with each change
  };
  std::vector<std::span<std::byte>> staging_memory(Link link);
  Registration registration(Link link, const Lock& lock);
  std::uint64_t registration_number() const noexcept { return registration_number_; }
  /// A link has that registration now, or will never have another.
  void registered(Link link, std::uint64_t number);

  Lock lock() { return Lock(mutex_); }
  bool stopping(const Lock&) const noexcept { return stopping_; }
  /// The most urgent block that can start on the link.
  std::optional<TransferBlock> pop(Link link, const Lock&) { return queues_[index_of(link)].pop(staging_of(link)); }
  /// The same, of what is more urgent than that.
  std::optional<TransferBlock> pop_before(TransferPriority priority, Link link, const Lock&) {
    return queues_[index_of(link)].pop_before(priority, staging_of(link));
  }
  bool has_work(Link link, const Lock&) const noexcept { return !queues_[index_of(link)].empty(); }
  /// The block's transfer has been readied, and has not failed.
  static bool has_begun(const TransferBlock& block, const Lock&) { return block.job->prepared && !block.job->error; }
  /// Readies the transfer on the first of its blocks; false where the block has nothing to do because its transfer has
  /// failed. Throws what `prepare` throws.
  bool begin(const TransferBlock& block);
  /// The blocks wait for their second link, which is one for all.
  void pass_on(std::span<TransferBlock> blocks);
  void pass_on(TransferBlock block) { pass_on({&block, 1}); }
  /// The blocks have come to rest, or failed.
  void end(std::span<EndOfBlock> ends);
  void end(TransferBlock block, std::exception_ptr error);
  /// The link, to or from NVMe, carries nothing more: what would cross it fails with this error.
  void lose(Link link, const std::exception_ptr& error);
  /// The block's transfer fails, and the kernel may still use the block's memory: the arena is never taken down.
  void abandon(TransferBlock block, std::exception_ptr error);

 private:
  Staging& staging_of(Link link) {
    const bool inwards = link == Link::nvme_to_host || link == Link::host_to_device;
    return inwards ? staging_in_ : staging_out_;
  }
  /// With the mutex: its last block has come to rest.
  void note_end(TransferJob& job);
  /// Tells of it, without.
  void finish(const TransferJob& job);
  void wake(Link link) { workers_[index_of(link)]->wake(); }

  HostArena& arena_;
  const std::size_t block_bytes_;
  TransferObserver* const observer_;

  mutable std::mutex mutex_;
  Staging staging_in_;   // on the way from NVMe to the device
  Staging staging_out_;  // on the way back
  std::array<LinkQueue, link_count> queues_;
  std::unordered_map<std::uint64_t, std::shared_ptr<TransferJob>> jobs_;
  std::uint64_t next_id_ = 1;
  std::condition_variable all_ended_;
  bool stopping_ = false;

  std::vector<std::span<std::byte>> registered_parts_;
  std::atomic<std::uint64_t> registration_number_{0};           ///< changed with the mutex, as they are
  std::array<std::uint64_t, link_count> registered_numbers_{};  ///< what each link has
  std::condition_variable has_registered_;

  Moved moved_{};
  std::array<std::unique_ptr<LinkWorker>, link_count> workers_;
};

}  // namespace terrace
