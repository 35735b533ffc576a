#include "offload/page_blocks.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>

#include "base/error.h"
#include "base/fallback.h"
#include "base/units.h"
#include "offload/huge_pages.h"

namespace terrace {
namespace {

constexpr std::uint64_t page_bytes = 4096;

[[noreturn]] void refuse(std::uint64_t bytes, const char* what) {
  throw OutOfMemory("device: " + std::string(what) + " " + format_bytes(bytes) + " failed: " + std::strerror(errno),
                    "lower device.memory or host.memory to what the machine has, or raise what it allows a process "
                    "(ulimit -d, ulimit -v, vm.max_map_count)");
}

/// What holds nothing that anybody wants, or is not even mapped any more, can be touched and is cleared then. False
/// where the system refuses.
bool renew(std::byte* memory, std::uint64_t bytes) noexcept {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* const mapped = mmap(memory, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == memory) {
    return true;
  }
  if (mapped != MAP_FAILED) {  // before Linux 4.17, which takes the address for a wish
    munmap(mapped, bytes);
  }
  return mprotect(memory, bytes, PROT_READ | PROT_WRITE) == 0;
}

/// The pages of `from` are those of `to` from now on; `from` stays mapped, with none. False where the system refuses:
/// then `from` is as it was, and `to`, which had none, may not be mapped any more.
bool move_pages(std::byte* from, std::byte* to, std::uint64_t bytes) noexcept {
  return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED;
}

}  // namespace

PageBlocks::Extent PageBlocks::Extents::add(Extent extent) {
  bytes_ += extent.bytes;
  auto after = by_offset_.upper_bound(extent.offset);
  if (after != by_offset_.end() && extent.offset + extent.bytes == after->first) {
    extent.bytes += after->second;
    erase(after++);
  }
  if (after != by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == extent.offset) {
      extent.offset = before->first;
      extent.bytes += before->second;
      erase(before);
    }
  }
  by_offset_.emplace(extent.offset, extent.bytes);
  by_size_.emplace(extent.bytes, extent.offset);
  return extent;
}

bool PageBlocks::Extents::take_whole(std::uint64_t bytes, Extent& found) {
  const auto fitting = by_size_.lower_bound({bytes, 0});
  if (fitting == by_size_.end()) {
    return false;
  }
  const auto [size, offset] = *fitting;
  erase(by_offset_.find(offset));
  bytes_ -= size;
  if (size > bytes) {
    add({offset + bytes, size - bytes});
  }
  found = {offset, bytes};
  return true;
}

PageBlocks::Extent PageBlocks::Extents::take_largest(std::uint64_t bytes) {
  const auto [size, offset] = *by_size_.rbegin();
  const std::uint64_t taken = std::min(size, bytes);
  erase(by_offset_.find(offset));
  bytes_ -= size;
  if (size > taken) {
    add({offset, size - taken});
  }
  return {offset + size - taken, taken};
}

void PageBlocks::Extents::erase(std::map<std::uint64_t, std::uint64_t>::iterator at) {
  by_size_.erase({at->second, at->first});
  by_offset_.erase(at);
}

PageBlocks::PageBlocks(std::uint64_t capacity) : capacity_(rounded(capacity)) {
  if (capacity_ == 0) {
    return;
  }
  fresh_.add({0, capacity_});
  base_ = map_from_huge_page(capacity_);
  if (base_ == nullptr) {
    refuse(capacity_, "mapping");
  }
  // Pages that move before any page beside them was touched would not be of one mapping with those when they are back.
  *base_ = std::byte{};
  madvise(base_, capacity_, MADV_HUGEPAGE);  // where the system has them
}

PageBlocks::~PageBlocks() {
  if (base_ != nullptr) {
    munmap(base_, capacity_);
  }
}

std::uint64_t PageBlocks::rounded(std::uint64_t bytes) noexcept {
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

std::byte* PageBlocks::take(std::uint64_t bytes, std::uint64_t limit) {
  bytes = rounded(bytes);
  const std::lock_guard lock(mutex_);
  Extent whole{};
  if (kept_.take_whole(bytes, whole)) {
    return base_ + whole.offset;
  }
  if (kept_.bytes() + fresh_.bytes() < bytes) {
    throw OutOfMemory("device: " + format_bytes(bytes) + " are wanted of " +
                      format_bytes(kept_.bytes() + fresh_.bytes()) + " that are left");
  }
  if (mapped_now() + bytes <= limit && fresh_.take_whole(bytes, whole)) {
    return base_ + whole.offset;
  }
  std::vector<Extent> pieces;
  for (std::uint64_t left = bytes; left > 0; left -= pieces.back().bytes) {
    pieces.push_back((kept_.bytes() > 0 ? kept_ : fresh_).take_largest(left));
  }
  return map_together(std::move(pieces), bytes);
}

std::byte* PageBlocks::map_together(std::vector<Extent> pieces, std::uint64_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    for (const Extent& piece : pieces) {
      kept_.add(piece);
    }
    errno = error;
    refuse(bytes, "mapping");
  }
  auto* const block = static_cast<std::byte*>(mapped);
  const std::vector<Extent>& scattered = scattered_.emplace(block, std::move(pieces)).first->second;
  std::byte* at = block;
  for (std::size_t i = 0; i < scattered.size(); ++i) {
    const Extent piece = scattered[i];
    keep_small(piece);
    if (!move_pages(base_ + piece.offset, at, piece.bytes)) {
      const int error = errno;
      madvise(base_ + piece.offset, piece.bytes, MADV_DONTNEED);
      if (!renew(at, piece.bytes)) {
        take_apart(block, i);
        errno = error;
        refuse(bytes, "moving pages into one mapping of");
      }
      madvise(at, piece.bytes, MADV_HUGEPAGE);
      note_fallback("device: pages are cleared where scattered ones would be moved together", std::strerror(error),
                    LogLevel::debug);
    }
    at += piece.bytes;
  }
  return block;
}

void PageBlocks::take_apart(std::byte* block, std::size_t whole) noexcept {
  const auto found = scattered_.find(block);
  std::byte* at = block;
  for (std::size_t i = 0; i < found->second.size(); ++i) {
    const Extent piece = found->second[i];
    std::byte* const home = base_ + piece.offset;
    // A home that the system does not map again is lost, and in neither.
    if (i >= whole || move_pages(at, home, piece.bytes)) {
      kept_.add(piece);
    } else if (renew(home, piece.bytes)) {
      fresh_.add(piece);
    }
    // The first that is not there may not even be mapped any more, and by now be another's.
    if (i != whole) {
      munmap(at, piece.bytes);
    }
    at += piece.bytes;
  }
  scattered_.erase(found);
}

void PageBlocks::give_back(std::byte* block, std::uint64_t bytes) noexcept {
  bytes = rounded(bytes);
  const std::lock_guard lock(mutex_);
  if (const auto found = scattered_.find(block); found != scattered_.end()) {
    take_apart(block, found->second.size());
  } else {
    kept_.add({static_cast<std::uint64_t>(block - base_), bytes});
  }
}

std::uint64_t PageBlocks::mapped() const {
  const std::lock_guard lock(mutex_);
  return mapped_now();
}

void PageBlocks::trim(std::uint64_t limit) noexcept {
  const std::lock_guard lock(mutex_);
  while (mapped_now() > limit && kept_.bytes() > 0) {
    const Extent extent = kept_.take_largest(rounded(mapped_now() - limit));
    keep_small(extent);
    madvise(base_ + extent.offset, extent.bytes, MADV_DONTNEED);
    let_grow(fresh_.add(extent));
  }
}

void PageBlocks::keep_small(Extent extent) noexcept {
  const std::uint64_t end = (extent.offset + extent.bytes + huge_page_bytes - 1) / huge_page_bytes;
  for (std::uint64_t i = extent.offset / huge_page_bytes; i < end; ++i) {
    if (small_.insert(i).second) {
      advise(i, MADV_NOHUGEPAGE);
    }
  }
}

void PageBlocks::let_grow(Extent empty) noexcept {
  const std::uint64_t end = (empty.offset + empty.bytes) / huge_page_bytes;
  auto small = small_.lower_bound((empty.offset + huge_page_bytes - 1) / huge_page_bytes);
  while (small != small_.end() && *small < end) {
    advise(*small, MADV_HUGEPAGE);
    small = small_.erase(small);
  }
}

void PageBlocks::advise(std::uint64_t stretch, int advice) noexcept {
  const std::uint64_t offset = stretch * huge_page_bytes;
  madvise(base_ + offset, std::min<std::uint64_t>(huge_page_bytes, capacity_ - offset), advice);
}

}  // namespace terrace
