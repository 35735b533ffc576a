#include "offload/cuda_fences.h"

#include <algorithm>
#include <utility>

namespace terrace {

CudaFences::Point::~Point() {
  const std::lock_guard lock(fences.mutex_);
  fences.spare_.insert(fences.spare_.end(), events.begin(), events.end());
}

CudaFences::~CudaFences() {
  // Each goes without the lock, which it takes itself.
  std::map<std::uint64_t, std::shared_ptr<Point>>().swap(pending_);
  for (const CudaEvent event : spare_) {
    driver_.destroy_event(event);
  }
}

Fence CudaFences::record(std::span<const CudaStream> streams) {
  if (streams.empty()) {
    return {};
  }
  forget_oldest_reached();
  auto point = std::make_shared<Point>(*this);
  point->events.reserve(streams.size());
  for (const CudaStream stream : streams) {
    point->events.push_back(spare_event());
    driver_.record(point->events.back(), stream);
  }
  const std::lock_guard lock(mutex_);
  pending_.emplace_hint(pending_.end(), ++last_, std::move(point));
  return static_cast<Fence>(last_);
}

void CudaFences::make_wait(CudaStream stream, Fence fence) {
  const std::shared_ptr<Point> point = find(fence);
  if (point != nullptr && !all_reached(*point)) {
    for (const CudaEvent event : point->events) {
      driver_.make_wait(stream, event);
    }
  }
}

bool CudaFences::reached(Fence fence) noexcept {
  try {
    const std::shared_ptr<Point> point = find(fence);
    if (point != nullptr && !all_reached(*point)) {
      return false;
    }
    forget(fence);
  } catch (...) {
    // It stays, for `wait` to meet the same error.
  }
  return true;
}

void CudaFences::wait(Fence fence) {
  const std::shared_ptr<Point> point = find(fence);
  if (point == nullptr) {
    return;
  }
  for (const CudaEvent event : point->events) {
    driver_.synchronize(event);
  }
  forget(fence);
}

CudaEvent CudaFences::spare_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      const CudaEvent event = spare_.back();
      spare_.pop_back();
      return event;
    }
    spare_.reserve(++created_);  // for when all of them are spare: taking them back must not fail
  }
  return driver_.create_event();
}

std::shared_ptr<CudaFences::Point> CudaFences::find(Fence fence) const {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(static_cast<std::uint64_t>(fence));
  return found == pending_.end() ? nullptr : found->second;
}

void CudaFences::forget(Fence fence) noexcept {
  std::shared_ptr<Point> point;  // goes after the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = pending_.find(static_cast<std::uint64_t>(fence)); found != pending_.end()) {
    point = std::move(found->second);
    pending_.erase(found);
  }
}

/// Fences that nobody asks for again, such as those of computation, are found here.
void CudaFences::forget_oldest_reached() {
  for (;;) {
    Fence oldest{};
    {
      const std::lock_guard lock(mutex_);
      if (pending_.empty()) {
        return;
      }
      oldest = static_cast<Fence>(pending_.begin()->first);
    }
    const std::shared_ptr<Point> point = find(oldest);
    if (point != nullptr && !all_reached(*point)) {
      return;
    }
    forget(oldest);
  }
}

bool CudaFences::all_reached(const Point& point) {
  return std::all_of(point.events.begin(), point.events.end(),
                     [&](const CudaEvent event) { return driver_.reached(event); });
}

}  // namespace terrace
