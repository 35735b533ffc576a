/// A fixed set of host blocks in which device and NVMe meet, carved from the arena at the start and lent to
/// one direction only: whoever holds a block gives it back without needing another.
///
/// Not thread-safe: guarded by the lock of whoever lends the blocks. Never waits.
#pragma once

#include <cstddef>
#include <exception>
#include <span>
#include <utility>
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

  /// What needs a block from now on fails with this error: the drive at the other end is lost.
  void fail(std::exception_ptr error) { failure_ = std::move(error); }
  const std::exception_ptr& failure() const noexcept { return failure_; }

  /// A block that was lent does not come back, and is never given back to the arena.
  void lose(std::byte* block) { std::erase(all_, block); }

  std::span<std::byte* const> blocks() const noexcept { return all_; }

 private:
  HostArena& arena_;
  std::vector<std::byte*> all_;
  std::vector<std::byte*> free_;
  std::exception_ptr failure_;
};

}  // namespace terrace
