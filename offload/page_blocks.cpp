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
                    "lower device.memory or host.memory to what the machine has");
}

/// What holds nothing that anybody wants gets cleared pages, when they are touched.
void renew(std::byte* memory, std::uint64_t bytes) noexcept {
  mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  madvise(memory, bytes, MADV_HUGEPAGE);
}

/// The pages of `from` are those of `to` from now on, in place of its own; `from` stays mapped, with none. False where
/// the system refuses: then there are cleared ones at `to`, and `from` is as it was.
bool move_pages(std::byte* from, std::byte* to, std::uint64_t bytes) noexcept {
  if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED) {
    return true;
  }
  const int error = errno;
  renew(to, bytes);
  errno = error;
  return false;
}

}  // namespace

void PageBlocks::Extents::add(Extent extent) {
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
  base_ = map_from_huge_page(capacity_);
  if (base_ == nullptr) {
    refuse(capacity_, "mapping");
  }
  madvise(base_, capacity_, MADV_HUGEPAGE);  // where the system has them
  fresh_.add({0, capacity_});
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
  std::byte* block = nullptr;
  try {
    block = map_together(pieces, bytes);
    scattered_.emplace(block, pieces);
    return block;
  } catch (...) {
    if (block != nullptr) {
      munmap(block, bytes);
    }
    for (const Extent& piece : pieces) {
      kept_.add(piece);
    }
    throw;
  }
}

std::byte* PageBlocks::map_together(const std::vector<Extent>& extents, std::uint64_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    refuse(bytes, "mapping");
  }
  auto* const block = static_cast<std::byte*>(mapped);
  std::byte* at = block;
  for (const Extent& extent : extents) {
    if (!move_pages(base_ + extent.offset, at, extent.bytes)) {
      note_fallback("device: pages are cleared where scattered ones would be moved together", std::strerror(errno),
                    LogLevel::debug);
      madvise(base_ + extent.offset, extent.bytes, MADV_DONTNEED);
    }
    at += extent.bytes;
  }
  return block;
}

void PageBlocks::give_back(std::byte* block, std::uint64_t bytes) noexcept {
  bytes = rounded(bytes);
  const std::lock_guard lock(mutex_);
  const auto found = scattered_.find(block);
  if (found == scattered_.end()) {
    kept_.add({static_cast<std::uint64_t>(block - base_), bytes});
    return;
  }
  std::byte* at = block;
  for (const Extent& extent : found->second) {
    (move_pages(at, base_ + extent.offset, extent.bytes) ? kept_ : fresh_).add(extent);
    at += extent.bytes;
  }
  munmap(block, bytes);
  scattered_.erase(found);
}

std::uint64_t PageBlocks::mapped() const {
  const std::lock_guard lock(mutex_);
  return mapped_now();
}

void PageBlocks::trim(std::uint64_t limit) noexcept {
  const std::lock_guard lock(mutex_);
  while (mapped_now() > limit && kept_.bytes() > 0) {
    const Extent extent = kept_.take_largest(rounded(mapped_now() - limit));
    madvise(base_ + extent.offset, extent.bytes, MADV_DONTNEED);
    fresh_.add(extent);
  }
}

}  // namespace terrace
