/// The device: the fastest tier, its memory, and the copies in and out of it.
///
/// Device memory is shared by slots (contiguous ranges that chunks occupy) and by the program's own tensors.
/// Both are counted in one budget before they are taken: `map_slot` and `allocate` expect the caller to
/// have reserved `slot_bytes` or `allocation_bytes` there, and the caller releases them after giving the
/// memory back. Implementations are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "offload/budget.h"

namespace terrace {

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual Budget& budget() noexcept = 0;

  /// What a slot, or an allocation of the program, of `bytes` takes from the budget.
  virtual std::uint64_t slot_bytes(std::uint64_t bytes) const noexcept = 0;
  virtual std::uint64_t allocation_bytes(std::uint64_t bytes) const noexcept = 0;

  /// A contiguous range with undefined contents. Throws OutOfMemory if the system has no memory left.
  virtual std::byte* map_slot(std::uint64_t bytes) = 0;
  virtual void unmap_slot(std::byte* slot, std::uint64_t bytes) noexcept = 0;

  /// Memory for a tensor of the program, aligned to 64 bytes, with undefined contents.
  virtual std::byte* allocate(std::uint64_t bytes) = 0;
  virtual void deallocate(std::byte* memory, std::uint64_t bytes) noexcept = 0;

  virtual void copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) = 0;
  virtual void copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) = 0;
  virtual void fill_zero(std::byte* device, std::uint64_t bytes) = 0;
};

}  // namespace terrace
