/// A transfer under way and the blocks it is cut into, as the parts of the transfer service know them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "offload/tier.h"
#include "offload/transfer.h"

namespace terrace {

/// The link that a transfer crosses first, and the one it crosses then.
struct Route {
  Link first;
  std::optional<Link> second;
};

Route route_of(const TransferRequest& request);

/// What is not constant is guarded by the board's mutex, but for `places`, which the thread of the first link sets
/// before any block moves.
struct TransferJob {
  TransferId id{};
  TransferRequest request;
  Route route{};
  std::size_t block_bytes = 0;
  std::int64_t queued_ns = monotonic_ns();
  std::int64_t started_ns = 0;
  std::int64_t ended_ns = 0;  ///< when its last block came to rest; nothing of it changes any more
  TransferPlaces places;
  std::size_t blocks = 0;
  std::size_t blocks_left = 0;
  bool prepared = false;
  std::exception_ptr error;

  std::size_t bytes_of(std::size_t block) const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(block_bytes, request.bytes - block * block_bytes));
  }
};

/// One block on its way. Owned by a queue or by the worker that moves it.
struct TransferBlock {
  std::shared_ptr<TransferJob> job;
  std::size_t index = 0;
  std::byte* staging = nullptr;  ///< held from the first link to the end of the second

  std::size_t bytes() const { return job->bytes_of(index); }
  std::byte* on_device() const { return job->places.device + index * job->block_bytes; }
  std::byte* on_host() const { return staging != nullptr ? staging : job->places.host.at(index); }
  ExtentId on_nvme() const { return job->places.nvme.at(index); }
};

/// A block that has come to rest, or failed.
struct EndOfBlock {
  TransferBlock block;
  std::exception_ptr error;
};

}  // namespace terrace
