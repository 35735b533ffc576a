/// A device whose memory is a hard share of the machine's own, so that everything about residency runs and
/// is tested on any machine.
///
/// Slots and the program's larger tensors come from one set of page blocks: what one side frees serves the
/// other, and memory in use plus kept for reuse never exceeds the capacity, so the two peaks do not add up.
/// Tensors below 64 KiB come from the C library, whose own reserves are not counted.
///
/// Each direction of its link has a rate and a latency: bytes are copied at once, and their fence is reached when a
/// link of that speed would have brought them. Computation is the caller's own and done when it returns, but for what
/// is only waited for (see emulated_computation.h).
#pragma once

#include <atomic>

#include "offload/device.h"
#include "offload/emulated_link.h"
#include "offload/page_blocks.h"

namespace terrace {

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(std::uint64_t capacity_bytes, LinkSpeed speed = {});

  std::string_view name() const noexcept override { return "emulated"; }
  Budget& budget() noexcept override { return budget_; }
  bool is_host_memory() const noexcept override { return true; }
  bool guards_slots() const noexcept override { return false; }
  void pin(std::span<std::byte> /*host*/) override {}
  void unpin(std::span<std::byte> /*host*/) noexcept override {}
  void computes_on(void* /*stream*/) override {}
  std::uint64_t slot_bytes(std::uint64_t bytes) const noexcept override;
  std::uint64_t allocation_bytes(std::uint64_t bytes) const noexcept override;
  std::byte* map_slot(std::uint64_t bytes) override;
  /// What is only waited for touches no memory: a copy comes after it by its own `after`.
  void unmap_slot(std::byte* slot, std::uint64_t bytes, std::optional<Fence> last_use = {}) noexcept override;
  std::byte* allocate(std::uint64_t bytes) override;
  void deallocate(std::byte* memory, std::uint64_t bytes) noexcept override;
  Fence copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, Fence after) override;
  Fence copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, Fence after) override;
  Fence fill_zero(std::byte* device, std::uint64_t bytes, Fence after) override;
  Fence computation() override;
  bool reached(Fence fence) noexcept override;
  std::optional<std::int64_t> reached_ns(Fence fence) noexcept override { return static_cast<std::int64_t>(fence); }
  void wait(Fence fence) override;

 private:
  std::byte* take_pages(std::uint64_t bytes);
  /// What page blocks may map: the capacity less what small tensors use.
  std::uint64_t page_limit() const noexcept;

  Budget budget_;
  EmulatedLink in_;
  EmulatedLink out_;
  PageBlocks pages_;
  std::atomic<std::uint64_t> small_bytes_{0};
};

}  // namespace terrace
