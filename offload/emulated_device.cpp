#include "offload/emulated_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/fallback.h"
#include "base/units.h"
#include "offload/emulated_computation.h"
#include "offload/huge_pages.h"

namespace terrace {
namespace {

constexpr std::uint64_t smallest_page_block = 64 * 1024;
constexpr std::uint64_t alignment = 64;

}  // namespace

EmulatedDevice::EmulatedDevice(std::uint64_t capacity_bytes, LinkSpeed speed)
    : budget_(Tier::device, capacity_bytes), in_(speed), out_(speed), pages_(capacity_bytes) {
  if (const std::string why_not = why_no_huge_pages(); !why_not.empty()) {
    note_fallback("device: its memory comes in small pages", why_not, LogLevel::debug);
  }
}

std::uint64_t EmulatedDevice::slot_bytes(std::uint64_t bytes) const noexcept { return PageBlocks::rounded(bytes); }

std::uint64_t EmulatedDevice::allocation_bytes(std::uint64_t bytes) const noexcept {
  return bytes >= smallest_page_block ? PageBlocks::rounded(bytes) : (bytes + alignment - 1) / alignment * alignment;
}

std::byte* EmulatedDevice::map_slot(std::uint64_t bytes) { return take_pages(bytes); }

void EmulatedDevice::unmap_slot(std::byte* slot, std::uint64_t bytes, std::optional<Fence> /*last_use*/) noexcept {
  pages_.give_back(slot, bytes);
}

std::byte* EmulatedDevice::allocate(std::uint64_t bytes) {
  if (bytes >= smallest_page_block) {
    return take_pages(bytes);
  }
  const std::uint64_t rounded = allocation_bytes(bytes);
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) {
    throw OutOfMemory("device: the system refused " + format_bytes(rounded));
  }
  small_bytes_.fetch_add(rounded, std::memory_order_relaxed);
  pages_.trim(page_limit());  // before these bytes are touched
  return static_cast<std::byte*>(memory);
}

void EmulatedDevice::deallocate(std::byte* memory, std::uint64_t bytes) noexcept {
  if (bytes >= smallest_page_block) {
    pages_.give_back(memory, bytes);
    return;
  }
  std::free(memory);
  small_bytes_.fetch_sub(allocation_bytes(bytes), std::memory_order_relaxed);
}

// A fence is the moment, on the monotonic clock in nanoseconds, at which it is reached. Bytes are copied whatever a
// copy has to come after: computation has read and written its own by the time it is queued, and copies in order.

Fence EmulatedDevice::copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, Fence after) {
  const std::int64_t there_ns = in_.carry(bytes, static_cast<std::int64_t>(after));
  std::memcpy(device, host, bytes);
  return static_cast<Fence>(there_ns);
}

Fence EmulatedDevice::copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, Fence after) {
  const std::int64_t there_ns = out_.carry(bytes, static_cast<std::int64_t>(after));
  std::memcpy(host, device, bytes);
  return static_cast<Fence>(there_ns);
}

Fence EmulatedDevice::computation() { return static_cast<Fence>(EmulatedComputation::of_this_process().ends_ns()); }

Fence EmulatedDevice::fill_zero(std::byte* device, std::uint64_t bytes, Fence after) {
  std::memset(device, 0, bytes);
  return after;
}

bool EmulatedDevice::reached(Fence fence) noexcept { return static_cast<std::int64_t>(fence) <= monotonic_ns(); }

void EmulatedDevice::wait(Fence fence) {
  // The wait is the emulated link itself: nothing signals the end of it but the time.
  sleep_until(static_cast<std::int64_t>(fence));
}

std::byte* EmulatedDevice::take_pages(std::uint64_t bytes) {
  std::byte* block = pages_.take(bytes, page_limit());
  pages_.trim(page_limit());  // small tensors may have come meanwhile
  return block;
}

std::uint64_t EmulatedDevice::page_limit() const noexcept {
  return budget_.capacity() - std::min(budget_.capacity(), small_bytes_.load(std::memory_order_relaxed));
}

}  // namespace terrace
