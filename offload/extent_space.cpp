#include "offload/extent_space.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace terrace {

ExtentSpace::ExtentSpace(std::uint64_t extents, std::size_t files)
    : runs_{{0, extents}}, free_extents_(extents), failing_(files) {}

std::vector<ExtentId> ExtentSpace::take(std::size_t count) {
  if (std::find(failing_.begin(), failing_.end(), true) != failing_.end()) {
    return take_beside_failing_files(count);
  }
  std::vector<ExtentId> extents;
  extents.reserve(count);
  const auto take_from = [&](std::map<std::uint64_t, std::uint64_t>::iterator run) {
    const auto [first, length] = *run;
    const std::uint64_t taken = std::min<std::uint64_t>(length, count - extents.size());
    // The rest of the run first: it may fail to allocate, and nothing has changed yet.
    if (taken < length) {
      runs_.emplace(first + taken, length - taken);
    }
    runs_.erase(run);
    for (std::uint64_t id = first; id < first + taken; ++id) {
      extents.push_back(ExtentId{id});
    }
    free_extents_ -= taken;
  };
  const auto whole = std::find_if(runs_.begin(), runs_.end(), [&](const auto& run) { return run.second >= count; });
  if (whole != runs_.end() && count > 0) {
    take_from(whole);
  }
  while (extents.size() < count) {
    take_from(runs_.begin());
  }
  return extents;
}

/// The lowest that are not in a failing file, and only then others.
std::vector<ExtentId> ExtentSpace::take_beside_failing_files(std::size_t count) {
  std::vector<ExtentId> extents;
  for (const bool of_failing : {false, true}) {
    for (const auto& [first, length] : runs_) {
      for (std::uint64_t id = first; id < first + length && extents.size() < count; ++id) {
        if (failing_[file_of(ExtentId{id})] == of_failing) {
          extents.push_back(ExtentId{id});
        }
      }
    }
  }
  for (const ExtentId extent : extents) {
    take_one(static_cast<std::uint64_t>(extent));
  }
  return extents;
}

void ExtentSpace::take_one(std::uint64_t id) {
  const auto run = std::prev(runs_.upper_bound(id));
  const auto [first, length] = *run;
  if (id + 1 < first + length) {
    runs_.emplace(id + 1, first + length - id - 1);
  }
  if (id == first) {
    runs_.erase(run);
  } else {
    run->second = id - first;
  }
  --free_extents_;
}

void ExtentSpace::give_back(ExtentId extent) {
  const auto id = static_cast<std::uint64_t>(extent);
  ++free_extents_;
  // Joined with the neighbouring runs.
  auto next = runs_.lower_bound(id);
  const bool joins_next = next != runs_.end() && next->first == id + 1;
  if (next != runs_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == id) {
      previous->second += 1 + (joins_next ? next->second : 0);
      if (joins_next) {
        runs_.erase(next);
      }
      return;
    }
  }
  if (joins_next) {
    auto run = runs_.extract(next);
    run.key() = id;
    ++run.mapped();
    runs_.insert(std::move(run));
  } else {
    runs_.emplace_hint(next, id, 1);
  }
}

}  // namespace terrace
