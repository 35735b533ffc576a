/// Writes and reads of extents for tests that need but one at a time.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "offload/nvme_store.h"
#include "tests/offload/aligned_bytes.h"

namespace terrace {

/// Runs operations to their end on a queue of its own. Used by one thread.
class StoreIo {
 public:
  explicit StoreIo(IoEngine& engine) : queue_(engine.open_queue(1)) {}

  void write(NvmeStore& store, ExtentId extent, std::span<const std::byte> bytes) {
    AlignedBytes block(store.extent_bytes() + 4096, std::byte{0xee});
    std::copy_n(bytes.begin(), std::min(bytes.size(), store.extent_bytes()), block.begin());
    const std::exception_ptr error = run(store.begin_write(extent, block.data(), bytes.size()));
    store.end_write(extent, error == nullptr);
    if (error) std::rethrow_exception(error);
  }

  AlignedBytes read(NvmeStore& store, ExtentId extent, std::size_t size) {
    AlignedBytes block(store.extent_bytes());
    const std::exception_ptr error = run(store.begin_read(extent, block.data(), size));
    store.end_read(extent, block.data(), error);
    block.resize(size);
    return block;
  }

  std::exception_ptr run(const IoOperation& operation) {
    queue_->submit(operation);
    std::vector<IoCompletion> done;
    while (done.empty()) queue_->wait(done);
    return done.front().error;
  }

 private:
  std::unique_ptr<IoQueue> queue_;
};

}  // namespace terrace
