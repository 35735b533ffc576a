/// What is known of the gradients of an optimizer's steps: for whoever wants to watch a training without holding it up.
///
/// Thread-safe. Nothing here waits for an update: it tells what has been found so far.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace terrace {

/// The gradient norms of one step, before clipping. Not finite where an element of a gradient is not.
struct GradientNorms {
  std::int64_t step = 0;         ///< of the optimizer, from 1 on
  double all = 0;                ///< over all parameters
  std::vector<double> by_group;  ///< in the order of the parameter groups
  bool skipped = false;          ///< the step changed nothing
};

class GradientReport {
 public:
  void note(GradientNorms norms) {
    const std::lock_guard lock(mutex_);
    skipped_ += norms.skipped ? 1 : 0;
    newest_ = std::move(norms);
  }

  /// Of the newest step whose norms have been found.
  std::optional<GradientNorms> newest() const {
    const std::lock_guard lock(mutex_);
    return newest_;
  }

  /// Steps that changed nothing, so far.
  std::int64_t skipped() const {
    const std::lock_guard lock(mutex_);
    return skipped_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<GradientNorms> newest_;
  std::int64_t skipped_ = 0;
};

}  // namespace terrace
