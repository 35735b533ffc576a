/// The worker of a link between host and NVMe: keeps an I/O queue filled with the link's blocks and settles each by
/// its completion.
///
/// A queue that throws is of no use any more: what is with it, and all that would follow, fails with that error.
///
/// Threads: its own, which alone touches the queue; `wake` from any.
#pragma once

#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <thread>

#include "offload/io_engine.h"
#include "offload/nvme_store.h"
#include "offload/transfer_board.h"

namespace terrace {

class NvmeWorker final : public LinkWorker {
 public:
  /// How many blocks of that size may be with a drive at once, each way.
  static std::size_t queue_depth(std::size_t block_bytes) noexcept;

  /// Opens its queue on the engine, with the link's staging blocks registered. Throws IoError where that fails.
  NvmeWorker(TransferBoard& board, NvmeStore& store, IoEngine& engine, Link link);
  ~NvmeWorker() override = default;
  NvmeWorker(const NvmeWorker&) = delete;
  NvmeWorker& operator=(const NvmeWorker&) = delete;

  void wake() noexcept override { io_->wake(); }
  void join() override { thread_.join(); }

 private:
  using Moving = std::list<TransferBlock>;  // addresses are the operations' owners

  void work();
  void start(TransferBlock block);
  void finish(const IoCompletion& completion);
  void fail_all(std::exception_ptr error);
  void end(Moving::iterator at, std::exception_ptr error);

  TransferBoard& board_;
  NvmeStore& store_;
  const Link link_;
  const std::unique_ptr<IoQueue> io_;
  Moving moving_;  // with the drive
  std::exception_ptr dead_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace terrace
