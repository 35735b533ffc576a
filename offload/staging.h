/// A fixed set of host blocks in which device and NVMe meet, carved from the arena at the start and lent to
/// one direction only: whoever holds a block gives it back without needing another.
///
/// Not thread-safe: guarded by the lock of whoever lends the blocks. Never waits.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "offload/host_arena.h"

namespace terrace {

class Staging {
 public:
  Staging(HostArena& arena, std::size_t blocks) : arena_(arena), all_(arena.allocate(blocks)), free_(all_) {}
  ~Staging() { arena_.free(all_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// A block, or null where all are lent.
  std::byte* try_take() {
    if (free_.empty()) {
      return nullptr;
    }
    std::byte* block = free_.back();
    free_.pop_back();
    return block;
  }

  void give_back(std::byte* block) { free_.push_back(block); }

  std::span<std::byte* const> blocks() const noexcept { return all_; }

 private:
  HostArena& arena_;
  const std::vector<std::byte*> all_;
  std::vector<std::byte*> free_;
};

}  // namespace terrace
