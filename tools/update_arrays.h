/// Parameters, gradients and states to update, as a bench has them: in memory of their own, in large pages where there
/// are any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizer/adamw.h"
#include "optimizer/update_threads.h"

namespace terrace {

class UpdateArrays {
 public:
  /// Throws OutOfMemory.
  UpdateArrays(ElementType parameter_type, ElementType gradient_type, StateFormat states, std::size_t count);
  ~UpdateArrays();
  UpdateArrays(const UpdateArrays&) = delete;
  UpdateArrays& operator=(const UpdateArrays&) = delete;

  const UpdateRun& run() const noexcept { return run_; }
  /// What an update has to read and write.
  std::size_t bytes_per_parameter() const noexcept;

  void update(const UpdateThreads& threads) const;

 private:
  UpdateRun run_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace terrace
