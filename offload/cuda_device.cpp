#include "offload/cuda_device.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/fallback.h"
#include "base/log.h"

namespace terrace {

std::uint64_t automatic_capacity(const CudaMemoryInfo& memory) noexcept {
  constexpr std::uint64_t least_margin = std::uint64_t{512} << 20U;
  const std::uint64_t margin = std::max(least_margin, memory.total_bytes / 32);
  return memory.free_bytes - std::min(memory.free_bytes, margin);
}

CudaDevice::CudaDevice(std::shared_ptr<CudaDriver> driver, std::uint64_t capacity_bytes)
    : driver_(std::move(driver)),
      budget_(Tier::device, capacity_bytes),
      fences_(*driver_),
      slots_(*driver_, fences_, budget_),
      in_(*driver_),
      out_(*driver_) {}

CudaDevice::~CudaDevice() {
  for (const OwnStream* own : {&in_, &out_}) {
    try {
      driver_->synchronize(own->stream);
    } catch (const Error& error) {
      log(LogLevel::error, error.message() + ", as the device was given back");
    }
  }
}

void CudaDevice::pin(std::span<std::byte> host) {
  if (host.empty()) {
    return;
  }
  try {
    driver_->register_host(host);
  } catch (const Error& error) {
    note_fallback("device: copies are slower, from and to host memory that is not pinned", error.message());
    return;
  }
  const std::lock_guard lock(mutex_);
  pinned_.insert(host.data());
}

void CudaDevice::unpin(std::span<std::byte> host) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (pinned_.erase(host.data()) == 0) {
      return;
    }
  }
  driver_->unregister_host(host);
}

std::byte* CudaDevice::map_slot(std::uint64_t bytes) {
  check();
  const CudaSlots::Taken taken = slots_.take(bytes);
  try {
    // All that comes into a slot comes on this stream.
    fences_.make_wait(in_.stream, taken.free_after);
  } catch (...) {
    slots_.give_back(taken.address, taken.free_after);
    throw;
  }
  return taken.address;
}

void CudaDevice::unmap_slot(std::byte* slot, std::uint64_t /*bytes*/, std::optional<Fence> last_use) noexcept {
  try {
    slots_.give_back(slot, last_use ? *last_use : computation());
  } catch (const std::exception& error) {
    log(LogLevel::error, error.what());
    const std::lock_guard lock(mutex_);
    if (!failure_) {
      failure_ = std::current_exception();
    }
  }
}

std::byte* CudaDevice::allocate(std::uint64_t bytes) {
  check();
  const CudaSlots::Taken taken = slots_.take(bytes);
  try {
    // Any stream may use it at once.
    fences_.wait(taken.free_after);
  } catch (...) {
    slots_.give_back(taken.address, taken.free_after);
    throw;
  }
  return taken.address;
}

Fence CudaDevice::copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, Fence after) {
  return issue(in_.stream, after, [&] { driver_->copy_in(device, host, bytes, in_.stream); });
}

Fence CudaDevice::copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, Fence after) {
  return issue(out_.stream, after, [&] { driver_->copy_out(host, device, bytes, out_.stream); });
}

Fence CudaDevice::fill_zero(std::byte* device, std::uint64_t bytes, Fence after) {
  return issue(in_.stream, after, [&] {
    if (bytes > 0) {
      driver_->fill(device, std::byte{}, bytes, in_.stream);
    }
  });
}

void CudaDevice::computes_on(void* stream) {
  auto* const compute = static_cast<CudaStream>(stream);
  const auto is_known = [&] { return std::find(compute_.begin(), compute_.end(), compute) != compute_.end(); };
  {
    const std::shared_lock lock(streams_mutex_);
    if (is_known()) {
      return;
    }
  }
  const std::lock_guard lock(streams_mutex_);
  if (!is_known()) {
    compute_.push_back(compute);
  }
}

Fence CudaDevice::computation() {
  const std::shared_lock lock(streams_mutex_);
  return fences_.record(compute_);
}

std::optional<std::int64_t> CudaDevice::reached_ns(Fence fence) noexcept {
  return fences_.reached(fence) ? std::optional(monotonic_ns()) : std::nullopt;
}

void CudaDevice::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

template <class Issue>
Fence CudaDevice::issue(CudaStream stream, Fence after, Issue&& copy) {
  check();
  fences_.make_wait(stream, after);
  copy();
  try {
    return fences_.record({&stream, 1});
  } catch (...) {
    driver_->synchronize(stream);  // the caller will take it for never begun
    throw;
  }
}

}  // namespace terrace
