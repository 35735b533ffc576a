/// How long the halves of a step compute: what passes from the first op of its forward to the first one of its
/// backward, and from there to its end, less the stalls meanwhile. Pure and not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace terrace {

class StepClock {
 public:
  struct Moment {
    std::int64_t now_ns = 0;
    double stall_seconds = 0;  ///< all that there was by then
  };

  void begin_forward(const Moment& moment) {
    forward_ = moment;
    backward_.reset();
  }
  /// Nothing where the step's backward has begun, or none of its forward was seen.
  void begin_backward(const Moment& moment) {
    if (forward_ && !backward_) backward_ = moment;
  }
  void end_step(const Moment& moment) {
    if (backward_) {
      const double forward = between(*forward_, *backward_);
      const double backward = between(*backward_, moment);
      if (forward + backward < forward_seconds_ + backward_seconds_ || backward_seconds_ == 0) {
        forward_seconds_ = forward;
        backward_seconds_ = backward;
      }
    }
    forward_.reset();
    backward_.reset();
  }

  /// Of the shortest step yet; 0 before there was one.
  double forward_seconds() const noexcept { return forward_seconds_; }
  double backward_seconds() const noexcept { return backward_seconds_; }

 private:
  static double between(const Moment& begin, const Moment& end) {
    const double seconds = static_cast<double>(end.now_ns - begin.now_ns) * 1e-9;
    return std::max(0.0, seconds - (end.stall_seconds - begin.stall_seconds));
  }

  std::optional<Moment> forward_;
  std::optional<Moment> backward_;
  double forward_seconds_ = 0;
  double backward_seconds_ = 0;
};

}  // namespace terrace
