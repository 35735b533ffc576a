/// The device: the fastest tier, its memory, and the copies in and out of it.
///
/// Device memory is shared by slots (contiguous ranges that chunks occupy) and by the program's own tensors.
/// Both are counted in one budget before they are taken: `map_slot` and `allocate` expect the caller to
/// have reserved `slot_bytes` or `allocation_bytes` there, and the caller releases them after giving the
/// memory back.
///
/// Copies are started in order on a queue for each direction; a fence says when one has been done. The
/// caller keeps both ends of a copy as they are until then. Implementations are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "offload/budget.h"

namespace terrace {

/// A point in the device's work, reached once everything issued before it on its queue has been done. Its value means
/// something to its device only; `Fence{}` has been reached from the start.
enum class Fence : std::uint64_t {};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual Budget& budget() noexcept = 0;

  /// Whether the CPU reads and writes the device's memory by its address.
  virtual bool is_host_memory() const noexcept = 0;

  /// Fixes host memory in place, so that copies to and from it run at the link's rate; it is `unpin`ned before it goes.
  /// Where the system refuses, a fallback is noted and copies go on slower.
  virtual void pin(std::span<std::byte> host) = 0;
  virtual void unpin(std::span<std::byte> host) noexcept = 0;

  /// What a slot, or an allocation of the program, of `bytes` takes from the budget.
  virtual std::uint64_t slot_bytes(std::uint64_t bytes) const noexcept = 0;
  virtual std::uint64_t allocation_bytes(std::uint64_t bytes) const noexcept = 0;

  /// Whether what comes into a new slot waits by itself for computation that may still use the room, where there is no
  /// other. If not, whoever fills it says what it is to come after.
  virtual bool guards_slots() const noexcept = 0;
  /// A contiguous range with undefined contents. Throws OutOfMemory if the system has no memory left.
  virtual std::byte* map_slot(std::uint64_t bytes) = 0;
  /// Computation that uses it has ended with `last_use`; unless that is given, with all that has been issued.
  virtual void unmap_slot(std::byte* slot, std::uint64_t bytes, std::optional<Fence> last_use = {}) noexcept = 0;

  /// Memory for a tensor of the program, aligned to 64 bytes, with undefined contents.
  virtual std::byte* allocate(std::uint64_t bytes) = 0;
  virtual void deallocate(std::byte* memory, std::uint64_t bytes) noexcept = 0;

  /// Start a copy, or the zeroing of a range, once `after` has been reached. Zeroing no bytes ends when the slot may be
  /// written.
  virtual Fence copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, Fence after = {}) = 0;
  virtual Fence copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, Fence after = {}) = 0;
  virtual Fence fill_zero(std::byte* device, std::uint64_t bytes, Fence after = {}) = 0;

  /// The program computes on this stream of the device, from now on too. One that is known already costs little.
  virtual void computes_on(void* stream) = 0;
  /// The point that the program's computation has been issued to so far, on all of its streams.
  virtual Fence computation() = 0;
  virtual bool reached(Fence fence) noexcept = 0;
  /// When the fence was reached, or will be, on the clock of `monotonic_ns`; nothing while that is not known. A device
  /// that is told only whether it was reached says the time of the first asking after it.
  virtual std::optional<std::int64_t> reached_ns(Fence fence) noexcept = 0;
  /// Blocks until the fence is reached.
  virtual void wait(Fence fence) = 0;
};

}  // namespace terrace
