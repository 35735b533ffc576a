#include "offload/copy_worker.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "offload/start_thread.h"

namespace terrace {
namespace {

/// Bytes that may be on a link at once: enough that it never idles while this thread wakes, few enough that a demand is
/// soon served. A GPU's link takes tens of gigabytes a second.
std::size_t bytes_in_flight(const Device& device) { return std::size_t{device.is_host_memory() ? 2U : 32U} << 20U; }
constexpr std::size_t fewest_in_flight = 2;

}  // namespace

CopyWorker::CopyWorker(TransferBoard& board, Device& device, Link link, const Processors& processors)
    : board_(board),
      device_(device),
      link_(link),
      most_in_flight_(std::max(bytes_in_flight(device) / board.block_bytes(), fewest_in_flight)),
      thread_(start_thread<std::thread>("transfer: starting the thread of the link " + std::string(name_of(link)),
                                        processors, [this] { work(); })) {}

void CopyWorker::work() {
  TransferBoard::Lock lock = board_.lock();
  for (;;) {
    std::optional<TransferBlock> next;
    if (copying_.size() < most_in_flight_) {
      next = board_.pop(link_, lock);
    }
    if (!next && copying_.empty()) {
      if (board_.stopping(lock)) {
        return;
      }
      work_.wait(lock);
      continue;
    }
    lock.unlock();
    if (next) {
      start(std::move(*next));
    }
    // The oldest is waited for only when no other can start.
    if (!copying_.empty() && (!next || device_.reached(copying_.front().there))) {
      finish_first();
    }
    lock.lock();
  }
}

void CopyWorker::start(TransferBlock block) {
  bool is_listed = false;
  try {
    if (!board_.begin(block)) {
      board_.end(std::move(block), nullptr);
      return;
    }
    copying_.push_back({block, Fence{}});  // for which there may be no memory, before bytes are on their way
    is_listed = true;
    copying_.back().there = copy(block);
  } catch (...) {
    if (is_listed) {
      copying_.pop_back();
    }
    board_.end(std::move(block), std::current_exception());
  }
}

Fence CopyWorker::copy(const TransferBlock& block) {
  const TransferRequest& request = block.job->request;
  if (request.fill) {
    // Where nothing is to be zeroed, it is there all the same when its room is free.
    const std::uint64_t zeroed = request.zeroes ? block.bytes() : 0;
    if (request.to == Tier::device) {
      return device_.fill_zero(block.on_device(), zeroed, request.after);
    }
    std::fill_n(block.on_host(), zeroed, std::byte{});
    return {};
  }
  return link_ == Link::host_to_device
             ? device_.copy_in(block.on_device(), block.on_host(), block.bytes(), request.after)
             : device_.copy_out(block.on_host(), block.on_device(), block.bytes(), request.after);
}

void CopyWorker::finish_first() {
  TransferBlock block = std::move(copying_.front().block);
  const Fence there = copying_.front().there;
  copying_.pop_front();
  try {
    device_.wait(there);
  } catch (...) {
    board_.end(std::move(block), std::current_exception());
    return;
  }
  if (link_ == Link::device_to_host && block.job->route.second) {
    board_.pass_on(std::move(block));
  } else {
    board_.end(std::move(block), nullptr);
  }
}

}  // namespace terrace
