#include "offload/extent_space.h"

#include <algorithm>

namespace terrace {

ExtentSpace::ExtentSpace(std::uint64_t extents, std::size_t files) : free_(extents), failing_(files) {
  for (std::uint64_t id = 0; id < extents; ++id) {
    free_.insert(id);
  }
}

std::vector<ExtentId> ExtentSpace::take(std::size_t count) {
  std::vector<ExtentId> extents;
  extents.reserve(count);
  const bool any_fails = std::ranges::find(failing_, true) != failing_.end();
  if (const std::uint64_t first = any_fails ? free_.places() : free_.first_of_run(count); first < free_.places()) {
    for (std::uint64_t id = first; id < first + count; ++id) {
      extents.push_back(ExtentId{id});
    }
  } else {
    add_lowest(extents, count, /*of_failing=*/false);
    add_lowest(extents, count, /*of_failing=*/true);
  }
  for (const ExtentId extent : extents) {
    free_.erase(static_cast<std::uint64_t>(extent));
  }
  return extents;
}

void ExtentSpace::give_back(ExtentId extent) noexcept { free_.insert(static_cast<std::uint64_t>(extent)); }

void ExtentSpace::add_lowest(std::vector<ExtentId>& extents, std::size_t count, bool of_failing) const {
  for (std::uint64_t id = free_.next(0); id < free_.places() && extents.size() < count; id = free_.next(id + 1)) {
    if (failing_[file_of(id)] == of_failing) {
      extents.push_back(ExtentId{id});
    }
  }
}

}  // namespace terrace
