#include "tools/probe_link.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "offload/budget.h"
#include "offload/host_arena.h"

namespace terrace {
namespace {

constexpr std::int64_t kLasts_ns = 500'000'000;
constexpr std::uint64_t kMostBytes = std::uint64_t{32} << 20U;  // on each side

/// A slot on the device with its part of the budget.
class Slot {
 public:
  Slot(Device& device, std::uint64_t bytes)
      : device_(device),
        bytes_(bytes),
        reservation_(device.budget(), Kind::other, device.slot_bytes(bytes)),
        memory_(device.map_slot(bytes)) {}
  ~Slot() { device_.unmap_slot(memory_, bytes_); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  std::byte* memory() const noexcept { return memory_; }

 private:
  Device& device_;
  const std::uint64_t bytes_;
  const Reservation reservation_;
  std::byte* const memory_;
};

/// Host memory that is pinned for the device.
class PinnedBlocks {
 public:
  PinnedBlocks(Device& device, std::size_t block_bytes, std::size_t count)
      : device_(device), arena_(block_bytes, count), blocks_(arena_.allocate(count)) {
    for (std::byte* block : blocks_) {
      std::fill_n(block, block_bytes, std::byte{1});
      device_.pin({block, block_bytes});
    }
  }
  ~PinnedBlocks() {
    for (std::byte* block : blocks_) device_.unpin({block, arena_.granule_bytes()});
  }
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;

  std::byte* operator[](std::size_t index) const { return blocks_[index]; }

 private:
  Device& device_;
  HostArena arena_;
  const std::vector<std::byte*> blocks_;
};

std::size_t block_count(Device& device, std::size_t block_bytes) {
  const std::uint64_t bytes = std::min(kMostBytes, device.budget().free() / 2);
  return static_cast<std::size_t>(std::max<std::uint64_t>(bytes / block_bytes, 2));
}

/// Bytes per second of `copy(block)`, which starts a block's copy. The fence of a block's last copy is waited for
/// before the block is copied again, so that what is in flight is bounded.
template <class Copy>
double rate_of(Device& device, std::size_t block_bytes, std::size_t count, const std::function<bool()>& stop,
               const Copy& copy) {
  std::vector<Fence> fences(count);
  std::uint64_t copies = 0;
  const Stopwatch watch;
  do {
    const std::size_t block = copies++ % count;
    device.wait(fences[block]);
    fences[block] = copy(block);
  } while (watch.elapsed_ns() < kLasts_ns && !stop());
  for (const Fence fence : fences) device.wait(fence);
  return static_cast<double>(copies * block_bytes) / watch.elapsed_seconds();
}

}  // namespace

LinkRates probe_link(Device& device, std::size_t block_bytes, const std::function<bool()>& stop) {
  const std::size_t count = block_count(device, block_bytes);
  const Slot slot(device, count * block_bytes);
  const PinnedBlocks host(device, block_bytes, count);
  const auto on_device = [&](std::size_t block) { return slot.memory() + block * block_bytes; };
  device.wait(device.fill_zero(slot.memory(), count * block_bytes));
  LinkRates rates;
  rates.in = rate_of(device, block_bytes, count, stop,
                     [&](std::size_t block) { return device.copy_in(on_device(block), host[block], block_bytes); });
  rates.out = rate_of(device, block_bytes, count, stop,
                      [&](std::size_t block) { return device.copy_out(host[block], on_device(block), block_bytes); });
  rates.measured_at = time_now();
  return rates;
}

}  // namespace terrace
