#include "offload/page_blocks.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>

#include "base/error.h"
#include "base/units.h"

namespace terrace {
namespace {

constexpr std::uint64_t page_bytes = 4096;
constexpr std::uint64_t huge_page_bytes = 2 * 1024 * 1024;

std::byte* map_pages(std::uint64_t bytes) {
  // Blocks that can hold huge pages start at the boundary of one.
  const std::uint64_t slack = bytes >= huge_page_bytes ? huge_page_bytes : 0;
  void* mapped =
      mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutOfMemory("device: mapping " + format_bytes(bytes) + " failed: " + std::strerror(errno),
                      "lower device.memory or host.memory to what the machine has");
  }
  auto* begin = static_cast<std::byte*>(mapped);
  if (slack == 0) {
    return begin;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uint64_t before = (huge_page_bytes - address % huge_page_bytes) % huge_page_bytes;
  if (before > 0) {
    munmap(begin, before);
  }
  if (slack > before) {
    munmap(begin + before + bytes, slack - before);
  }
  madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
}

}  // namespace

PageBlocks::~PageBlocks() { trim(0); }

std::uint64_t PageBlocks::rounded(std::uint64_t bytes) noexcept {
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

std::byte* PageBlocks::take(std::uint64_t bytes, std::uint64_t limit) {
  bytes = rounded(bytes);
  std::unique_lock lock(mutex_);
  if (const auto found = kept_by_size_.find(bytes); found != kept_by_size_.end()) {
    const auto kept = found->second.back();  // the one freed last is the warmest
    found->second.pop_back();
    if (found->second.empty()) {
      kept_by_size_.erase(found);
    }
    std::byte* block = kept->block;
    kept_.erase(kept);
    return block;
  }
  trim_locked(limit > bytes ? limit - bytes : 0, lock);
  std::byte* block = map_pages(bytes);
  mapped_ += bytes;
  return block;
}

void PageBlocks::give_back(std::byte* block, std::uint64_t bytes) noexcept {
  bytes = rounded(bytes);
  const std::unique_lock lock(mutex_);
  kept_.push_back({block, bytes});
  kept_by_size_[bytes].push_back(std::prev(kept_.end()));
}

std::uint64_t PageBlocks::mapped() const {
  const std::unique_lock lock(mutex_);
  return mapped_;
}

void PageBlocks::trim(std::uint64_t limit) noexcept {
  const std::unique_lock lock(mutex_);
  trim_locked(limit, lock);
}

void PageBlocks::trim_locked(std::uint64_t limit, const std::unique_lock<std::mutex>&) noexcept {
  while (mapped_ > limit && !kept_.empty()) {
    const auto oldest = kept_.begin();
    const auto found = kept_by_size_.find(oldest->bytes);
    auto& same_size = found->second;
    same_size.erase(std::find(same_size.begin(), same_size.end(), oldest));
    if (same_size.empty()) {
      kept_by_size_.erase(found);  // programs of changing shapes ask for ever new sizes
    }
    munmap(oldest->block, oldest->bytes);
    mapped_ -= oldest->bytes;
    kept_.erase(oldest);
  }
}

}  // namespace terrace
