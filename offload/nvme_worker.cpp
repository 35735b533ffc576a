#include "offload/nvme_worker.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace terrace {
namespace {

/// Bytes that may be with a drive at once, each way, and operations.
constexpr std::size_t bytes_in_flight = std::size_t{8} << 20U;
constexpr std::size_t fewest_operations = 8;
constexpr std::size_t most_operations = 64;

std::unique_ptr<IoQueue> open_queue(TransferBoard& board, IoEngine& engine, Link link) {
  std::vector<std::span<std::byte>> registered;
  for (std::byte* block : board.staging_blocks(link)) {
    registered.emplace_back(block, board.block_bytes());
  }
  return engine.open_queue(NvmeWorker::queue_depth(board.block_bytes()), registered);
}

}  // namespace

std::size_t NvmeWorker::queue_depth(std::size_t block_bytes) noexcept {
  return std::clamp(bytes_in_flight / block_bytes, fewest_operations, most_operations);
}

NvmeWorker::NvmeWorker(TransferBoard& board, NvmeStore& store, IoEngine& engine, Link link)
    : board_(board), store_(store), link_(link), io_(open_queue(board, engine, link)), thread_([this] { work(); }) {}

void NvmeWorker::work() {
  std::vector<IoCompletion> completions;
  for (;;) {
    std::optional<TransferBlock> next;
    {
      const TransferBoard::Lock lock = board_.lock();
      if (moving_.size() < io_->depth()) {
        next = board_.pop(link_, lock);
      }
      if (!next && moving_.empty() && board_.stopping(lock)) {
        return;
      }
    }
    completions.clear();
    if (next) {
      start(std::move(*next));
    }
    try {
      if (next) {
        io_->poll(completions);
      } else {
        io_->wait(completions);
      }
    } catch (...) {
      fail_all(std::current_exception());
    }
    for (const IoCompletion& completion : completions) {
      finish(completion);
    }
  }
}

void NvmeWorker::start(TransferBlock block) {
  const auto at = moving_.insert(moving_.end(), std::move(block));
  try {
    if (dead_) {
      std::rethrow_exception(dead_);
    }
    if (!board_.begin(*at)) {
      end(at, nullptr);
      return;
    }
    IoOperation operation = link_ == Link::nvme_to_host ? store_.begin_read(at->on_nvme(), at->on_host(), at->bytes())
                                                        : store_.begin_write(at->on_nvme(), at->on_host(), at->bytes());
    operation.owner = &*at;
    io_->submit(operation);
  } catch (...) {
    end(at, std::current_exception());
  }
}

void NvmeWorker::finish(const IoCompletion& completion) {
  const auto at = std::find_if(moving_.begin(), moving_.end(),
                               [&](const TransferBlock& block) { return &block == completion.owner; });
  if (at == moving_.end()) {
    return;
  }
  const TransferJob& job = *at->job;
  const ExtentId extent = at->on_nvme();
  std::exception_ptr error = completion.error;
  try {
    if (link_ == Link::nvme_to_host) {
      store_.end_read(extent, at->on_host(), error);
    } else {
      store_.end_write(extent, error == nullptr);
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error && link_ == Link::host_to_nvme && job.request.write_failed) {
    job.request.write_failed(extent, error);
  }
  if (!error && link_ == Link::nvme_to_host && job.route.second) {
    TransferBlock block = std::move(*at);
    moving_.erase(at);
    board_.pass_on(std::move(block));
    return;
  }
  end(at, error);
}

void NvmeWorker::fail_all(std::exception_ptr error) {
  dead_ = error;
  while (!moving_.empty()) {
    finish({.owner = &moving_.front(), .error = error});
  }
}

void NvmeWorker::end(Moving::iterator at, std::exception_ptr error) {
  TransferBlock block = std::move(*at);
  moving_.erase(at);
  board_.end(std::move(block), std::move(error));
}

}  // namespace terrace
