#include "memory/use_fences.h"

#include <algorithm>

namespace terrace {

void UseFences::note_point() {
  const Fence fence = device_.computation();
  if (fence == Fence{}) {
    ended_ = uses_;  // it computes nothing behind the program
    points_.clear();
    return;
  }
  if (!points_.empty() && points_.back().fence == fence) {
    points_.back().uses = uses_;
    return;
  }
  points_.push_back({uses_, fence});
  while (points_.size() > few_points && device_.reached(points_.front().fence)) {
    ended_ = points_.front().uses;
    points_.pop_front();
  }
}

Fence UseFences::after(std::uint64_t number) {
  if (number > (points_.empty() ? ended_ : points_.back().uses)) {
    note_point();
  }
  if (number <= ended_) {
    return {};
  }
  const auto point = std::lower_bound(points_.begin(), points_.end(), number,
                                      [](const Point& each, std::uint64_t use) { return each.uses < use; });
  return point->fence;
}

}  // namespace terrace
