#include "offload/host_arena.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <sys/mman.h>

#include "base/error.h"
#include "base/units.h"
#include "offload/errno_text.h"
#include "offload/huge_pages.h"

namespace terrace {
namespace {

constexpr std::size_t kAlignmentBytes = 4096;

}  // namespace

HostArena::HostArena(std::size_t granule_bytes, std::size_t granule_count)
    : granule_bytes_(granule_bytes), granule_count_(granule_count) {
  if (granule_bytes == 0 || granule_bytes % kAlignmentBytes != 0) {
    throw LogicError("host: a granule of " + std::to_string(granule_bytes) + " B is not a multiple of 4096 B");
  }
  if (granule_count > std::numeric_limits<std::size_t>::max() / granule_bytes) {
    throw LogicError("host: " + std::to_string(granule_count) + " granules of " + std::to_string(granule_bytes) +
                     " B exceed the address space");
  }
  if (granule_count == 0) return;
  region_ = map_from_huge_page(capacity_bytes());
  if (region_ == nullptr) {
    throw OutOfMemory("host: mapping an arena of " + format_bytes(capacity_bytes()) + " failed: " + errno_text(errno),
                      "lower host.memory or raise the address space limit (ulimit -v)");
  }
  try {
    touched_ = PlaceSet(granule_count);
    untouched_ = PlaceSet(granule_count);
  } catch (...) {
    ::munmap(region_, capacity_bytes());
    throw;
  }
  for (std::uint64_t granule = 0; granule < granule_count; ++granule) untouched_.insert(granule);
}

HostArena::~HostArena() {
  if (region_ != nullptr && !keeps_mapped_) ::munmap(region_, capacity_bytes());
}

std::vector<std::byte*> HostArena::allocate(std::size_t count) {
  std::lock_guard lock(mutex_);
  const std::uint64_t free_count = touched_.count() + untouched_.count();
  if (count > free_count) {
    throw LogicError("host: arena asked for " + std::to_string(count) + " granules with " + std::to_string(free_count) +
                     " of " + std::to_string(granule_count_) + " free");
  }
  std::vector<std::byte*> granules;
  granules.reserve(count);
  const auto take = [&](PlaceSet& from, std::uint64_t first) {
    for (std::uint64_t granule = first; granule < granule_count_ && granules.size() < count;
         granule = from.next(granule + 1)) {
      from.erase(granule);
      used_end_ = std::max(used_end_, granule + 1);
      granules.push_back(address_of(granule));
    }
  };
  const std::uint64_t run = touched_.first_of_run(count);
  take(touched_, run < granule_count_ ? run : touched_.next(0));
  take(untouched_, untouched_.next(0));  // the lowest, so that `used_region` grows late
  return granules;
}

void HostArena::free(std::span<std::byte* const> granules) {
  const auto begin = reinterpret_cast<std::uintptr_t>(region_);
  std::size_t freed = 0;
  std::lock_guard lock(mutex_);
  const auto granule_of = [&](const std::byte* address) {
    return (reinterpret_cast<std::uintptr_t>(address) - begin) / granule_bytes_;
  };
  for (std::byte* address : granules) {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(address) - begin;  // wraps if below the region
    const std::uint64_t granule = granule_of(address);
    if (granule >= granule_count_ || offset % granule_bytes_ != 0 || !is_in_use(granule)) {
      for (std::byte* const earlier : granules.first(freed)) touched_.erase(granule_of(earlier));
      throw LogicError("host: freed an address that is not a granule in use of this arena");
    }
    touched_.insert(granule);
    ++freed;
  }
}

void HostArena::keep_all() noexcept {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; older ones refuse it, and nothing is lost
#endif
  std::size_t touched = 0;
  {
    std::lock_guard lock(mutex_);
    keeps_all_ = true;
    touched = used_end_ * granule_bytes_;
    // What is fixed has memory, also where it is free.
    for (std::uint64_t granule = untouched_.next(0); granule < used_end_; granule = untouched_.next(granule)) {
      untouched_.erase(granule);
      touched_.insert(granule);
    }
  }
  if (region_ == nullptr) return;
  ::madvise(region_, capacity_bytes(), MADV_HUGEPAGE);
  ::madvise(region_, touched, MADV_COLLAPSE);
}

void HostArena::ask_for_huge_pages() noexcept {
  const std::size_t whole = used_region().size() / huge_page_bytes * huge_page_bytes;
  if (whole > 0) ::madvise(region_, whole, MADV_HUGEPAGE);
}

void HostArena::may_trim() noexcept {
  std::lock_guard lock(mutex_);
  keeps_all_ = false;
}

std::span<std::byte> HostArena::used_region() const {
  std::lock_guard lock(mutex_);
  return region().first(used_end_ * granule_bytes_);
}

std::vector<std::span<std::byte>> HostArena::used_parts() const {
  const std::span<std::byte> used = used_region();
  const std::size_t pages = (used.size() + huge_page_bytes - 1) / huge_page_bytes;
  const std::size_t part_bytes = (pages + most_parts - 1) / most_parts * huge_page_bytes;
  std::vector<std::span<std::byte>> parts;
  for (std::size_t begin = 0; begin < used.size(); begin += part_bytes) {
    parts.push_back(used.subspan(begin, std::min(part_bytes, used.size() - begin)));
  }
  return parts;
}

std::size_t HostArena::trim() {
  std::lock_guard lock(mutex_);
  if (keeps_all_) {
    return 0;
  }
  std::size_t trimmed = 0;
  for (std::uint64_t first = touched_.next(0); first < granule_count_;) {
    const std::uint64_t end = touched_.next_missing(first);
    if (::madvise(address_of(first), (end - first) * granule_bytes_, MADV_DONTNEED) == 0) {
      trimmed += (end - first) * granule_bytes_;
      for (std::uint64_t granule = first; granule < end; ++granule) {
        touched_.erase(granule);
        untouched_.insert(granule);
      }
    }
    first = touched_.next(end);
  }
  return trimmed;
}

std::size_t HostArena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return (granule_count_ - untouched_.count() - touched_.count()) * granule_bytes_;
}

std::size_t HostArena::touched_bytes() const {
  std::lock_guard lock(mutex_);
  return (granule_count_ - untouched_.count()) * granule_bytes_;
}

std::size_t HostArena::choose_granule(std::uint64_t chunk_bytes, std::uint64_t most_bytes) {
  if (chunk_bytes == 0 || chunk_bytes % kAlignmentBytes != 0) {
    throw LogicError("host: a chunk of " + std::to_string(chunk_bytes) + " B is not a multiple of 4096 B");
  }
  const std::uint64_t most =
      std::clamp<std::uint64_t>(std::min(chunk_bytes / 32, most_bytes), kAlignmentBytes, chunk_bytes);
  std::uint64_t granule = most / kAlignmentBytes * kAlignmentBytes;
  while (chunk_bytes % granule != 0) granule -= kAlignmentBytes;
  return static_cast<std::size_t>(granule);
}

}  // namespace terrace
