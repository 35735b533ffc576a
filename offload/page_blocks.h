/// Blocks of whole pages, reused at their exact size and given back to the system before the total would
/// exceed a limit.
///
/// The pages of the system are the granules: blocks of any size stay contiguous in the address space and
/// never fragment the memory behind them. A block that is freed is kept, so that a slot or an activation of
/// the same size is served without a page fault; kept blocks are unmapped, oldest first, as soon as a new
/// size needs their bytes. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace terrace {

class PageBlocks {
 public:
  PageBlocks() = default;
  PageBlocks(const PageBlocks&) = delete;
  PageBlocks& operator=(const PageBlocks&) = delete;
  /// Unmaps what is kept; blocks still in use must be given back first.
  ~PageBlocks();

  static std::uint64_t rounded(std::uint64_t bytes) noexcept;

  /// A block of `rounded(bytes)` bytes with undefined contents, while in use plus kept stays within `limit`.
  /// Throws OutOfMemory if the system refuses the pages.
  std::byte* take(std::uint64_t bytes, std::uint64_t limit);
  void give_back(std::byte* block, std::uint64_t bytes) noexcept;

  /// Bytes mapped: in use and kept for reuse.
  std::uint64_t mapped() const;

  /// Unmaps kept blocks until at most `limit` bytes are mapped, as far as they go.
  void trim(std::uint64_t limit) noexcept;

 private:
  struct Kept {
    std::byte* block;
    std::uint64_t bytes;
  };

  void trim_locked(std::uint64_t limit, const std::unique_lock<std::mutex>& lock) noexcept;

  mutable std::mutex mutex_;
  std::uint64_t mapped_ = 0;
  std::list<Kept> kept_;  // oldest first
  std::unordered_map<std::uint64_t, std::vector<std::list<Kept>::iterator>> kept_by_size_;
};

}  // namespace terrace
