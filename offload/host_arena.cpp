#include "offload/host_arena.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <limits>
#include <string>
#include <sys/mman.h>

#include "base/error.h"
#include "base/units.h"
#include "offload/errno_text.h"

namespace terrace {
namespace {

constexpr std::size_t kAlignmentBytes = 4096;

/// So many bytes that begin with a huge page; null where the system refuses.
std::byte* map_aligned(std::size_t bytes) {
  constexpr std::size_t page = HostArena::huge_page_bytes;
  void* const mapped =
      ::mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(mapped);
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(mapped) % page) % page;
  const std::size_t end = (before + bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  if (before > 0) ::munmap(first, before);
  if (end < bytes + page) ::munmap(first + end, bytes + page - end);
  return first + before;
}

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
  in_use_.assign(granule_count, false);
  untouched_.reserve(granule_count);
  touched_.reserve(granule_count);  // so that `free` and `trim` cannot fail half way
  for (std::size_t granule = granule_count; granule > 0; --granule) untouched_.push_back(granule - 1);
  if (granule_count == 0) return;

  region_ = map_aligned(capacity_bytes());
  if (region_ == nullptr) {
    throw OutOfMemory("host: mapping an arena of " + format_bytes(capacity_bytes()) + " failed: " + errno_text(errno),
                      "lower host.memory or raise the address space limit (ulimit -v)");
  }
}

HostArena::~HostArena() {
  if (region_ != nullptr && !keeps_mapped_) ::munmap(region_, capacity_bytes());
}

std::vector<std::byte*> HostArena::allocate(std::size_t count) {
  std::lock_guard lock(mutex_);
  const std::size_t free_count = touched_.size() + untouched_.size();
  if (count > free_count) {
    throw LogicError("host: arena asked for " + std::to_string(count) + " granules with " + std::to_string(free_count) +
                     " of " + std::to_string(granule_count_) + " free");
  }
  std::vector<std::byte*> granules;
  granules.reserve(count);
  while (granules.size() < count) {
    std::vector<std::size_t>& from = touched_.empty() ? untouched_ : touched_;
    in_use_[from.back()] = true;
    used_end_ = std::max(used_end_, from.back() + 1);
    granules.push_back(address_of(from.back()));
    from.pop_back();
  }
  return granules;
}

void HostArena::free(std::span<std::byte* const> granules) {
  const auto begin = reinterpret_cast<std::uintptr_t>(region_);
  std::vector<std::size_t> freed;
  freed.reserve(granules.size());
  std::lock_guard lock(mutex_);
  for (std::byte* address : granules) {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(address) - begin;  // wraps if below the region
    const std::size_t granule = offset / granule_bytes_;
    if (granule >= granule_count_ || offset % granule_bytes_ != 0 || !in_use_[granule]) {
      for (std::size_t earlier : freed) in_use_[earlier] = true;
      throw LogicError("host: freed an address that is not a granule in use of this arena");
    }
    in_use_[granule] = false;
    freed.push_back(granule);
  }
  touched_.insert(touched_.end(), freed.begin(), freed.end());
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
    const auto fixed = std::stable_partition(untouched_.begin(), untouched_.end(),
                                             [&](std::size_t granule) { return granule >= used_end_; });
    touched_.insert(touched_.begin(), fixed, untouched_.end());
    untouched_.erase(fixed, untouched_.end());
  }
  if (region_ == nullptr) return;
  ::madvise(region_, capacity_bytes(), MADV_HUGEPAGE);
  ::madvise(region_, touched, MADV_COLLAPSE);
}

void HostArena::may_trim() noexcept {
  std::lock_guard lock(mutex_);
  keeps_all_ = false;
}

std::span<std::byte> HostArena::used_region() const {
  std::lock_guard lock(mutex_);
  return region().first(used_end_ * granule_bytes_);
}

std::vector<std::span<std::byte>> HostArena::used_parts(std::size_t fixed_bytes) const {
  const std::span<std::byte> used = used_region();
  const std::size_t end = used.size() / huge_page_bytes * huge_page_bytes;
  const std::size_t begin = std::min((fixed_bytes + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes, end);
  std::vector<std::span<std::byte>> parts;
  for (const std::span<std::byte> part : {used.first(begin), used.subspan(begin, end - begin), used.subspan(end)}) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

std::size_t HostArena::trim() {
  std::lock_guard lock(mutex_);
  if (keeps_all_) {
    return 0;
  }
  // Highest first, so that what ends up on top of `untouched_` is the low end, as at the start.
  std::sort(touched_.begin(), touched_.end(), std::greater<>());
  const std::vector<std::size_t> candidates = touched_;
  touched_.clear();

  std::size_t trimmed = 0;
  for (std::size_t first = 0; first < candidates.size();) {
    std::size_t last = first;  // candidates[first..last] are neighbours, descending
    while (last + 1 < candidates.size() && candidates[last + 1] + 1 == candidates[last]) ++last;
    const std::size_t count = last - first + 1;
    const bool given_back = ::madvise(address_of(candidates[last]), count * granule_bytes_, MADV_DONTNEED) == 0;
    std::vector<std::size_t>& to = given_back ? untouched_ : touched_;
    to.insert(to.end(), candidates.begin() + static_cast<std::ptrdiff_t>(first),
              candidates.begin() + static_cast<std::ptrdiff_t>(last + 1));
    if (given_back) trimmed += count * granule_bytes_;
    first = last + 1;
  }
  return trimmed;
}

std::size_t HostArena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return (granule_count_ - untouched_.size() - touched_.size()) * granule_bytes_;
}

std::size_t HostArena::touched_bytes() const {
  std::lock_guard lock(mutex_);
  return (granule_count_ - untouched_.size()) * granule_bytes_;
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
