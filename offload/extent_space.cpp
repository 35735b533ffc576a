#include "offload/extent_space.h"

#include <algorithm>

namespace terrace {

ExtentSpace::ExtentSpace(std::uint64_t extents, std::size_t files)
    : extents_(extents), free_((extents + word_bits - 1) / word_bits), free_extents_(extents), failing_(files) {
  for (std::uint64_t id = 0; id < extents; ++id) {
    free_[id / word_bits] |= std::uint64_t{1} << id % word_bits;
  }
}

std::vector<ExtentId> ExtentSpace::take(std::size_t count) {
  std::vector<ExtentId> extents;
  extents.reserve(count);
  const bool any_fails = std::ranges::find(failing_, true) != failing_.end();
  if (const std::uint64_t first = any_fails ? extents_ : first_of_run(count); first < extents_) {
    for (std::uint64_t id = first; id < first + count; ++id) {
      extents.push_back(ExtentId{id});
    }
  } else {
    add_lowest(extents, count, /*of_failing=*/false);
    add_lowest(extents, count, /*of_failing=*/true);
  }
  for (const ExtentId extent : extents) {
    const auto id = static_cast<std::uint64_t>(extent);
    free_[id / word_bits] &= ~(std::uint64_t{1} << id % word_bits);
  }
  free_extents_ -= extents.size();
  return extents;
}

void ExtentSpace::give_back(ExtentId extent) noexcept {
  const auto id = static_cast<std::uint64_t>(extent);
  free_[id / word_bits] |= std::uint64_t{1} << id % word_bits;
  ++free_extents_;
}

/// The first of so many free neighbours, the lowest; the number of extents where there is no such run.
std::uint64_t ExtentSpace::first_of_run(std::size_t count) const {
  std::uint64_t run = 0;
  for (std::uint64_t id = 0; id < extents_; ++id) {
    if (id % word_bits == 0 && free_[id / word_bits] == 0) {
      id += word_bits - 1;  // as most are in a store that is well used
      run = 0;
      continue;
    }
    run = is_free(id) ? run + 1 : 0;
    if (run == count) {
      return id + 1 - count;
    }
  }
  return extents_;
}

void ExtentSpace::add_lowest(std::vector<ExtentId>& extents, std::size_t count, bool of_failing) const {
  for (std::uint64_t id = 0; id < extents_ && extents.size() < count; ++id) {
    if (is_free(id) && failing_[file_of(id)] == of_failing) {
      extents.push_back(ExtentId{id});
    }
  }
}

}  // namespace terrace
