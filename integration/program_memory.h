/// Where the program's own tensors on the CPU come from while a session lives: the device's memory, within its budget,
/// where the CPU computes, and the host's for a model under construction.
///
/// LibTorch's CPU allocator is replaced once, at the first session, and never put back; without a session,
/// or under `Pause`, it forwards to the allocator that was there. A block remembers whose it is, so tensors
/// may outlive the session. Thread-safe, but for `attach` and `detach`, which belong to the session.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Allocator.h>

#include "offload/tier.h"

namespace terrace {

/// Gives memory to tensors and takes it back, counting it. Kept alive by every block it gave.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// At least `bytes` bytes, aligned to 64. Throws OutOfMemory.
  virtual std::byte* take(std::uint64_t bytes, Kind kind) = 0;
  virtual void give_back(std::byte* block, std::uint64_t bytes, Kind kind) noexcept = 0;
};

/// What the allocator asks of the session that lives.
class ProgramMemory {
 public:
  virtual ~ProgramMemory() = default;
  /// Where this thread's tensors on the CPU come from now; null: LibTorch's previous allocator, uncounted.
  virtual std::shared_ptr<BlockSource> source() = 0;
  /// Hears of a refusal before it is thrown as c10::OutOfMemoryError.
  virtual void refused(std::exception_ptr error) noexcept = 0;
};

/// Installs the allocator where it is not yet, and sends the program's tensors to `memory`.
void attach_program_memory(ProgramMemory& memory);
/// From now on tensors come from LibTorch's previous allocator.
void detach_program_memory() noexcept;

/// A block of `bytes` from `source`, counted as `kind`, of memory that belongs to `device`.
c10::DataPtr allocate_from(const std::shared_ptr<BlockSource>& source, std::uint64_t bytes, Kind kind,
                           c10::Device device = c10::DeviceType::CPU);
/// What `source` has counted for the block behind `data`; 0 if it is not one of its blocks.
std::uint64_t bytes_counted_by(const BlockSource& source, const c10::DataPtr& data) noexcept;
/// What the block behind `data` is counted as; nothing if no source gave it.
std::optional<Kind> kind_of(const c10::DataPtr& data) noexcept;
/// A block of the program's that is not one any more; still counted as it was.
struct TakenBlock {
  std::byte* memory = nullptr;  ///< as BlockSource::take returned it
  std::uint64_t bytes = 0;      ///< as it was asked for
  std::uint64_t offset = 0;     ///< of the data in it
  Kind kind = Kind::other;
};

/// What a block of so much data that the CPU reaches asks of its source.
std::uint64_t block_bytes(std::uint64_t data_bytes) noexcept;
/// Takes the block behind `data`, which is left without one. Nothing, and `data` as it was, if it is not one of
/// `source` of exactly so much data, or the CPU does not reach it.
std::optional<TakenBlock> take_block(const std::shared_ptr<BlockSource>& source, std::uint64_t data_bytes,
                                     c10::DataPtr& data) noexcept;
/// The contrary.
c10::DataPtr put_back_block(const std::shared_ptr<BlockSource>& source, const TakenBlock& block) noexcept;
/// An ordinary block, of LibTorch's previous allocator; uncounted.
c10::DataPtr allocate_ordinary(std::uint64_t bytes, c10::Device device = c10::DeviceType::CPU);

}  // namespace terrace
