/// Points in the work of CUDA streams, as fences.
///
/// A fence is a number that is never used again; behind it stand one event a stream until it is known to have been
/// reached, when they serve the next one. So a fence that is not known any more has been reached. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "offload/cuda_driver.h"
#include "offload/device.h"

namespace terrace {

class CudaFences {
 public:
  explicit CudaFences(CudaDriver& driver) : driver_(driver) {}
  CudaFences(const CudaFences&) = delete;
  CudaFences& operator=(const CudaFences&) = delete;
  /// Nothing may wait for a fence any more.
  ~CudaFences();

  /// Stands for all that has been issued to the streams so far. Of no streams it has been reached.
  Fence record(std::span<const CudaStream> streams);

  /// What is issued to `stream` from now on comes after the fence.
  void make_wait(CudaStream stream, Fence fence);

  /// Where the driver fails to say so, `wait` says why.
  bool reached(Fence fence) noexcept;
  void wait(Fence fence);

 private:
  /// The events of one fence, which go back to the spare ones with whoever lets go of it last.
  struct Point {
    explicit Point(CudaFences& its_fences) noexcept : fences(its_fences) {}
    Point(const Point&) = delete;
    Point& operator=(const Point&) = delete;
    ~Point();

    CudaFences& fences;
    std::vector<CudaEvent> events;
  };

  CudaEvent spare_event();
  /// Null where the fence has been reached.
  std::shared_ptr<Point> find(Fence fence) const;
  void forget(Fence fence) noexcept;
  void forget_oldest_reached();
  bool all_reached(const Point& point);

  CudaDriver& driver_;
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Point>> pending_;  ///< in the order of their fences
  std::vector<CudaEvent> spare_;
  std::size_t created_ = 0;
};

}  // namespace terrace
