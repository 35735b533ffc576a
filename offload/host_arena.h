#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "offload/place_set.h"

namespace terrace {

/// Host memory for chunks: one region, mapped once, handed out in granules of one size.
///
/// A chunk on the host is a list of granules, so chunks of several sizes do not fragment the region. Those of one lie
/// side by side as far as free memory does: a drive moves them faster so. Memory is taken from the system when a
/// granule is first touched, and touched memory is reused before untouched memory is. Contents of an allocated granule
/// are unspecified. It keeps no budget: who may allocate how much is decided above, and running out is therefore a
/// LogicError. Thread-safe. The constructor throws OutOfMemory if the region cannot be mapped.
class HostArena {
 public:
  /// `granule_bytes` is a multiple of 4096.
  HostArena(std::size_t granule_bytes, std::size_t granule_count);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::vector<std::byte*> allocate(std::size_t count);
  /// All or none: throws LogicError, and frees nothing, if one of them is not a granule in use of this arena.
  void free(std::span<std::byte* const> granules);

  /// Gives the memory of free granules back to the system; returns how many bytes. Pages that are locked in memory
  /// stay. Allocations wait meanwhile.
  std::size_t trim();
  /// From now on, until `may_trim`, nothing is given back: whoever fixes memory in place, a device or the kernel, would
  /// not hear of it. What was ever handed out is put into huge pages where the system has them, which are easier to
  /// fix, and counts as touched.
  void keep_all() noexcept;
  void may_trim() noexcept;
  /// Its addresses are never given to anything else, even after its end: the kernel may still use them.
  void keep_mapped() noexcept { keeps_mapped_ = true; }
  /// What was handed out so far, and has no memory yet, will have huge pages where the system gives them, as far as it
  /// fills such. What is fixed later stays in the pages that it is in.
  void ask_for_huge_pages() noexcept;
  /// All of it.
  std::span<std::byte> region() const noexcept { return {region_, region_ != nullptr ? capacity_bytes() : 0}; }

  std::size_t granule_bytes() const noexcept { return granule_bytes_; }
  std::size_t capacity_bytes() const noexcept { return granule_bytes_ * granule_count_; }
  std::size_t used_bytes() const;
  /// Granules handed out, or told to be kept, at least once since they were last trimmed: the most memory this arena
  /// can be holding.
  std::size_t touched_bytes() const;
  /// All granules that were ever handed out lie in this first part of the region.
  std::span<std::byte> used_region() const;
  /// The same in parts, as it is fixed best: they begin with huge pages and are as few of those as keeps their number
  /// within `most_parts`. One small page is enough for the kernel to know all of a part by small pages, and some are
  /// small for good: those of an end that was fixed before it was as long as a huge page.
  std::vector<std::span<std::byte>> used_parts() const;
  static constexpr std::size_t most_parts = 1024;  ///< as many as Linux before 5.13 takes

  /// The largest divisor of `chunk_bytes` that is a multiple of 4096, at most `most_bytes` and, beyond that
  /// smallest, at most a 32nd of the chunk: full chunks waste nothing, and one that is cut short wastes little. Throws
  /// LogicError unless given a positive multiple of 4096.
  static std::size_t choose_granule(std::uint64_t chunk_bytes, std::uint64_t most_bytes = most_granule_bytes);
  static constexpr std::size_t most_granule_bytes = std::size_t{1} << 20U;

 private:
  std::byte* address_of(std::uint64_t granule) const noexcept { return region_ + granule * granule_bytes_; }
  bool is_in_use(std::uint64_t granule) const noexcept {
    return !touched_.contains(granule) && !untouched_.contains(granule);
  }

  const std::size_t granule_bytes_;
  const std::size_t granule_count_;
  std::byte* region_ = nullptr;

  std::atomic<bool> keeps_mapped_{false};
  mutable std::mutex mutex_;
  bool keeps_all_ = false;
  std::uint64_t used_end_ = 0;  // above the highest granule that was ever handed out
  PlaceSet untouched_;          // free granules without memory
  PlaceSet touched_;            // free ones with memory
};

}  // namespace terrace
