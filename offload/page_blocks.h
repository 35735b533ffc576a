/// Blocks of whole pages out of one memory of a given capacity, which never fragments.
///
/// Every block is contiguous in the address space. Where pages side by side are free it is a stretch of the memory
/// itself; where free pages lie scattered, they move side by side (mremap) for as long as the block lives. So bytes
/// given back serve whatever is taken next, at any size, and in the steady state no page is cleared or charged anew.
/// Pages that were used once are kept, until `trim` gives them back to the system. They are huge ones where the system
/// has those for who asks. Where it cannot move pages, as before Linux 5.7, they are cleared ones instead. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace terrace {

class PageBlocks {
 public:
  /// At most `capacity` bytes can be in use at once. Throws OutOfMemory if the system refuses the address space; its
  /// pages are taken as blocks are touched.
  explicit PageBlocks(std::uint64_t capacity);
  PageBlocks(const PageBlocks&) = delete;
  PageBlocks& operator=(const PageBlocks&) = delete;
  /// Blocks still in use must be given back first.
  ~PageBlocks();

  static std::uint64_t rounded(std::uint64_t bytes) noexcept;

  /// A block of `rounded(bytes)` bytes with undefined contents, while in use plus kept stays within `limit`. Throws
  /// OutOfMemory if less than that is left of the capacity, or if the system refuses a mapping or to move pages.
  std::byte* take(std::uint64_t bytes, std::uint64_t limit);
  void give_back(std::byte* block, std::uint64_t bytes) noexcept;

  /// Bytes in use and kept for reuse.
  std::uint64_t mapped() const;

  /// Gives kept pages back to the system until at most `limit` bytes are mapped, as far as they go.
  void trim(std::uint64_t limit) noexcept;

 private:
  struct Extent {
    std::uint64_t offset;
    std::uint64_t bytes;
  };

  /// Free stretches of the memory, neighbours joined.
  class Extents {
   public:
    std::uint64_t bytes() const noexcept { return bytes_; }
    /// The stretch that it is part of now.
    Extent add(Extent extent);
    /// The smallest that holds `bytes`, cut to them; false if none does.
    bool take_whole(std::uint64_t bytes, Extent& found);
    /// At most `bytes` of the largest, from its end.
    Extent take_largest(std::uint64_t bytes);

   private:
    void erase(std::map<std::uint64_t, std::uint64_t>::iterator at);

    std::map<std::uint64_t, std::uint64_t> by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
    std::uint64_t bytes_ = 0;
  };

  // The lock is held for these.

  /// Mapped by blocks or kept for reuse.
  std::uint64_t mapped_now() const noexcept { return capacity_ - fresh_.bytes(); }
  /// A mapping of its own of scattered pages. Without it they are free again.
  std::byte* map_together(std::vector<Extent> pieces, std::uint64_t bytes);
  /// The pages of such a mapping are back in the memory and free. Only the first `whole` pieces are there.
  void take_apart(std::byte* block, std::size_t whole) noexcept;
  // Of 2 MiB of which only a part has pages the system (khugepaged) would make one huge page in time, with pages that
  // nobody counts. So they are to stay small until all of them are empty.
  void keep_small(Extent extent) noexcept;
  void let_grow(Extent empty) noexcept;
  void advise(std::uint64_t stretch, int advice) noexcept;

  const std::uint64_t capacity_;
  std::byte* base_ = nullptr;  ///< all of it, in order

  mutable std::mutex mutex_;
  Extents kept_;                                                   ///< free, with pages behind them
  Extents fresh_;                                                  ///< free, without
  std::unordered_map<std::byte*, std::vector<Extent>> scattered_;  ///< blocks with a mapping of their own
  std::set<std::uint64_t> small_;                                  ///< stretches of 2 MiB that are to have no huge page
};

}  // namespace terrace
