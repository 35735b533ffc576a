/// The recorded sequence of accesses of a step, with the device bytes that are not chunks at each of them.
///
/// A step runs from one mark to the next. The last complete one is what is known of the program's future.
/// Not thread-safe: it belongs to the policy.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "memory/chunk.h"

namespace terrace {

class Schedule {
 public:
  struct Entry {
    Access access;
    std::uint64_t program_bytes = 0;  ///< the program's own tensors on the device at that moment
  };

  void record(const Access& access, std::uint64_t program_bytes) { recording_.push_back({access, program_bytes}); }

  void finish_step() {
    last_step_ = std::exchange(recording_, {});
    recording_.reserve(last_step_.size());
  }

  const std::vector<Entry>& last_step() const noexcept { return last_step_; }

 private:
  std::vector<Entry> recording_;
  std::vector<Entry> last_step_;
};

}  // namespace terrace
