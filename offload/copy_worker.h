/// The worker of a link between host and device: starts copies on the device's queue, a few at a time, and ends each
/// block when its fence has been reached. It sees to blocks that come from nowhere too.
///
/// Threads: its own, which alone touches `copying_`; `wake` from any.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>

#include "offload/device.h"
#include "offload/processors.h"
#include "offload/transfer_board.h"

namespace terrace {

class CopyWorker final : public LinkWorker {
 public:
  CopyWorker(TransferBoard& board, Device& device, Link link, const Processors& processors = {});
  ~CopyWorker() override = default;
  CopyWorker(const CopyWorker&) = delete;
  CopyWorker& operator=(const CopyWorker&) = delete;

  void wake() noexcept override { work_.notify_one(); }
  void join() override { thread_.join(); }

 private:
  struct Copying {
    TransferBlock block;
    Fence there;
  };

  void work();
  void start(TransferBlock block);
  Fence copy(const TransferBlock& block);
  void finish_first();

  TransferBoard& board_;
  Device& device_;
  const Link link_;
  const std::size_t most_in_flight_;
  std::condition_variable work_;
  std::deque<Copying> copying_;  // in the order of their fences
  std::thread thread_;           // last: it uses all of the above
};

}  // namespace terrace
