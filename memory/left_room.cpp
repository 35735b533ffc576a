#include "memory/left_room.h"

#include <algorithm>

namespace terrace {

void LeftRoom::left(std::uint64_t bytes, Fence last_use) {
  if (last_use == Fence{}) {
    return;
  }
  left_.push_back({bytes, last_use});
  while (left_.size() > few && device_.reached(left_.front().last_use)) {
    left_.pop_front();
  }
}

Fence LeftRoom::taken(std::uint64_t free_bytes) {
  // Those that left last are what is free, as far as they fit into it; the others may be what was taken.
  auto first_free = left_.end();
  while (first_free != left_.begin() && std::prev(first_free)->bytes <= free_bytes) {
    free_bytes -= (--first_free)->bytes;
  }
  for (auto each = left_.begin(); each != first_free; ++each) {
    used_again_ = std::max(used_again_, each->last_use);
  }
  left_.erase(left_.begin(), first_free);
  return used_again_;
}

}  // namespace terrace
