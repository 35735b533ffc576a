/// One asynchronous movement of bytes between tiers, as its parts know it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "base/error.h"
#include "offload/device.h"
#include "offload/nvme_store.h"
#include "offload/tier.h"

namespace terrace {

/// What a transfer is for; the more urgent first. Someone waits for `demand` now; `early` is wanted so much later that
/// it is for when a link has nothing else to carry.
enum class TransferPriority : std::uint8_t { demand, prefetch, write_back, early };
inline constexpr std::size_t transfer_priority_count = 4;

/// Names a transfer that was started; never reused.
enum class TransferId : std::uint64_t {};

/// How a transfer ends that was cancelled before anything of it had started.
class Cancelled : public Error {
 public:
  using Error::Error;
};

/// How a transfer ends of which nobody knows whether the drive still works on it: its host memory and its extents are
/// not to be used again, and stay taken.
class Unanswered : public IoError {
 public:
  using IoError::IoError;
};

/// Where the bytes are on the tiers that the transfer touches. On host and NVMe they lie in blocks of a granule.
struct TransferPlaces {
  std::byte* device = nullptr;
  std::vector<std::byte*> host;
  std::vector<ExtentId> nvme;
};

struct TransferRequest {
  Tier from = Tier::host;
  Tier to = Tier::device;
  bool fill = false;   ///< the bytes come from nowhere
  bool zeroes = true;  ///< of a fill: `to` is zeroed; otherwise it keeps whatever is there
  Kind kind = Kind::other;
  std::uint32_t index = 0;  ///< of the chunk, for observers
  std::uint64_t bytes = 0;
  TransferPriority priority = TransferPriority::demand;
  Fence after{};  ///< when the device has finished with both ends

  /// Gives the places, on a thread of the service, before the first byte moves. What it throws fails the transfer.
  std::function<TransferPlaces()> prepare;
  /// Called once, on a thread of the service and under none of its locks, when no part of the transfer is in flight
  /// any more: with null, or the first error. Must not throw.
  std::function<void(std::exception_ptr error)> done;
  /// Called before `done` for each extent whose write failed. Must not throw.
  std::function<void(ExtentId extent, std::exception_ptr error)> write_failed;
};

/// What an observer is told of a transfer at its end. Times are those of `monotonic_ns`.
struct TransferRecord {
  Tier from;
  Tier to;
  bool fill;
  Kind kind;
  std::uint32_t index;
  std::uint64_t bytes;
  TransferPriority priority;
  bool failed;
  std::int64_t queued_ns;
  std::int64_t started_ns;  ///< 0 where it failed before
  std::int64_t ended_ns;
};

/// Sees every transfer of a service end, on the service's threads, before its `done`. Must be quick and not throw.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  virtual void on_transfer(const TransferRecord& record) noexcept = 0;
};

}  // namespace terrace
