#include "offload/page_blocks.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/error.h"
#include "base/units.h"

namespace terrace {
namespace {

constexpr std::uint64_t page_bytes = 4096;

[[noreturn]] void refuse(std::uint64_t bytes, const char* what) {
  throw OutOfMemory("device: " + std::string(what) + " " + format_bytes(bytes) + " failed: " + std::strerror(errno),
                    "lower device.memory or host.memory to what the machine has");
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
  struct rlimit limit {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < capacity_) {  // the system would end the process
    throw OutOfMemory("device: setting aside " + format_bytes(capacity_) + " exceeds the limit on the size of files, " +
                          format_bytes(limit.rlim_cur) + ", which holds for such memory too",
                      "raise the limit (ulimit -f) or lower device.memory");
  }
  file_ = memfd_create("terrace-device", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(capacity_)) != 0) {
    const int error = errno;
    if (file_ >= 0) {
      close(file_);
    }
    errno = error;
    refuse(capacity_, "setting aside");
  }
  void* mapped = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(file_);
    errno = error;
    refuse(capacity_, "mapping");
  }
  base_ = static_cast<std::byte*>(mapped);
  madvise(base_, capacity_, MADV_HUGEPAGE);  // where the system has them for such memory
  try {
    elsewhere_ = PlaceSet(capacity_ / page_bytes);
    fresh_.add({0, capacity_});
  } catch (...) {
    munmap(base_, capacity_);
    close(file_);
    throw;
  }
}

PageBlocks::~PageBlocks() {
  if (base_ != nullptr) {
    munmap(base_, capacity_);
    close(file_);
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
    map_again(whole);
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
    if (mmap(at, extent.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE | MAP_NORESERVE, file_,
             static_cast<off_t>(extent.offset)) == MAP_FAILED) {
      const int error = errno;
      munmap(block, bytes);
      errno = error;
      refuse(bytes, "mapping");
    }
    madvise(base_ + extent.offset, extent.bytes, MADV_DONTNEED);  // a page counts as resident wherever it is mapped
    set_elsewhere(extent, true);
    at += extent.bytes;
  }
  return block;
}

void PageBlocks::set_elsewhere(const Extent& extent, bool elsewhere) noexcept {
  const std::uint64_t end = (extent.offset + extent.bytes) / page_bytes;
  for (std::uint64_t page = extent.offset / page_bytes; page < end; ++page) {
    elsewhere ? elsewhere_.insert(page) : elsewhere_.erase(page);
  }
}

void PageBlocks::map_again(const Extent& extent) {
  const std::uint64_t end = (extent.offset + extent.bytes) / page_bytes;
  // Of those that are there already the system would look at each.
  for (std::uint64_t page = elsewhere_.next(extent.offset / page_bytes, end); page < end;) {
    const std::uint64_t end_of_run = elsewhere_.next_missing(page, end);
    const Extent run{page * page_bytes, (end_of_run - page) * page_bytes};
    madvise(base_ + run.offset, run.bytes, MADV_POPULATE_WRITE);  // else each faults
    set_elsewhere(run, false);
    page = elsewhere_.next(end_of_run, end);
  }
}

void PageBlocks::give_back(std::byte* block, std::uint64_t bytes) noexcept {
  bytes = rounded(bytes);
  const std::lock_guard lock(mutex_);
  const auto found = scattered_.find(block);
  if (found == scattered_.end()) {
    kept_.add({static_cast<std::uint64_t>(block - base_), bytes});
    return;
  }
  munmap(block, bytes);
  for (const Extent& extent : found->second) {
    kept_.add(extent);
  }
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
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(extent.offset),
              static_cast<off_t>(extent.bytes));
    set_elsewhere(extent, false);  // they are nowhere
    fresh_.add(extent);
  }
}

}  // namespace terrace
