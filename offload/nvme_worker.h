/// The worker of a link between host and NVMe: keeps an I/O queue filled with the link's blocks and settles each by
/// its completion.
///
/// The drive is never to wait for checksums: what is free of the queue is filled before what has come is verified, and
/// some of what is to be written has its checksum before there is room for it.
///
/// A queue that throws, and one of whose operations is not answered in time, is of no use any
/// more: what would follow fails with that error, and what is with it ends as Unanswered. Nobody knows whether the
/// kernel still reads or writes that memory, so that the arena, the queue and the store's files are never taken down.
///
/// Transfers begin and end by calls of their owners, which may take their time: between one that did and the next it
/// looks after the drive.
///
/// What it has to do with the board it does for several small blocks at a time, as it does with the queue: otherwise
/// they would cost more than the drive's own part of them.
///
/// Threads: its own, which alone touches the queue; `wake` and `tick` from any.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "offload/io_engine.h"
#include "offload/nvme_store.h"
#include "offload/processors.h"
#include "offload/transfer_board.h"

namespace terrace {

class NvmeWorker final : public LinkWorker {
 public:
  /// Ticks for which an operation may go without an answer.
  static constexpr std::uint64_t most_ticks = 60;

  static constexpr std::size_t fewest_operations = 8;
  /// How many blocks of that size may be with a drive at once, each way.
  static std::size_t default_depth(std::size_t block_bytes) noexcept;

  /// Opens its queue on the engine, with the link's staging blocks and the store's files registered. Throws IoError
  /// where that fails, or no thread can be started.
  NvmeWorker(TransferBoard& board, NvmeStore& store, IoEngine& engine, Link link, std::size_t depth,
             const Processors& processors = {});
  ~NvmeWorker() override;
  NvmeWorker(const NvmeWorker&) = delete;
  NvmeWorker& operator=(const NvmeWorker&) = delete;

  void wake() noexcept override;
  void tick() noexcept override;
  void join() override { thread_.join(); }

 private:
  /// A block on its way. Its address is the operation's owner.
  struct Moving {
    TransferBlock block;
    bool has_begun = false;  ///< its transfer has, by the time the board gave the block
    bool is_ready = false;   ///< the operation is
    IoOperation operation{};
    bool is_told = false;        ///< the drive has heard of it,
    std::uint64_t since = 0;     ///< at this tick
    std::exception_ptr error{};  ///< of the operation, once that has been answered; of the transfer, before
    bool is_with_queue = false;
    std::list<Moving>::iterator place{};  ///< its own, in whichever list
  };
  using AllMoving = std::list<Moving>;
  enum class Filled { all, in_part, late, nothing_will_come };  ///< late: in part, and that took long

  void work();
  Filled fill();
  void register_anew();
  std::size_t bytes_to_check(const Moving& moving) const;
  void choose(std::size_t room, std::size_t bytes, const TransferBoard::Lock& lock);
  AllMoving::iterator next_ready(const TransferBoard::Lock& lock);
  AllMoving::iterator take_in(TransferBlock block, const TransferBoard::Lock& lock);
  std::size_t make_ready();
  void submit(AllMoving::iterator at);
  bool receive(Filled filled);
  void settle_some();
  void settle_reads();
  void settle_writes();
  void give_up_on_the_unanswered();
  void give_up_on(AllMoving::iterator at, const std::string& why);
  void die(const std::exception_ptr& error);
  /// Tells the store that the operation is over; the error that it comes to, if any.
  std::exception_ptr end_in_store(const Moving& moving, std::exception_ptr error);
  void end(AllMoving& list, AllMoving::iterator at, std::exception_ptr error);
  void report();

  TransferBoard& board_;
  NvmeStore& store_;
  const Link link_;
  const std::size_t most_ready_;      ///< beyond what there is room for
  const std::size_t gathered_bytes_;  ///< before the drive hears of them
  std::unique_ptr<IoQueue> io_;
  std::uint64_t registration_ = 0;  ///< that the queue has
  std::atomic<std::uint64_t> ticks_{0};
  std::atomic<bool> is_full_{false};  ///< takes nothing from the board before an answer comes
  std::uint64_t last_look_ = 0;       ///< for what is unanswered: the tick of it
  std::condition_variable work_;      ///< in place of a queue that is broken
  AllMoving chosen_;                  ///< what goes on next, in this order
  AllMoving ready_;                   ///< for the queue
  AllMoving moving_;                  ///< with the queue
  AllMoving answered_;                ///< by it, and not settled
  std::vector<IoCompletion> completions_;
  std::vector<NvmeStore::Beginning> beginnings_;
  std::vector<NvmeStore::EndOfRead> ends_of_reads_;
  std::vector<NvmeStore::EndOfWrite> ends_of_writes_;
  std::size_t passed_in_a_row_ = 0;  ///< submissions since the oldest of `ready_` was submitted
  AllMoving unanswered_;
  AllMoving spare_;                       ///< for blocks to come
  std::vector<TransferBlock> passed_on_;  ///< of which the board has not heard
  std::vector<EndOfBlock> ended_;         ///< likewise
  bool broken_ = false;                   ///< the queue throws
  std::exception_ptr dead_;               ///< what everything fails with from now on
  std::thread thread_;                    // last: it uses all of the above
};

}  // namespace terrace
