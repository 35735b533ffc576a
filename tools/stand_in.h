/// A GPT whose computation is only waited for: the parameters of a real one, used in the order that a real one was
/// seen to use them, by ops that take their share of a given time on the device (see emulated_computation.h) and leave
/// the cores free. As on a GPU, the program runs ahead of them.
///
/// Its ops are registered with LibTorch like any other, so that whoever intercepts ops, gradients and allocations sees
/// what a real model would show. Forward reads a byte of every operand, backward makes the gradients. Parameters are
/// fp32 or bf16.
#pragma once

#include <cstddef>
#include <vector>

#include <torch/torch.h>

#include "tools/bare_loops.h"
#include "tools/gpt.h"

namespace terrace {

/// One op of a forward: which of `parameters()` it reads.
struct RecordedUse {
  std::vector<std::size_t> parameters;
  bool backward_reads = true;  ///< an embedding's backward makes a gradient without reading the weight
  double share = 0;            ///< of the elements that all uses read
};

/// What a forward of a Gpt reads, in its order. Runs one, on an ordinary model of its own: call it while no session
/// lives, or under Pause.
std::vector<RecordedUse> record_uses(const GptOptions& options);

class StandIn {
 public:
  /// Of the computation: backward computes twice as much.
  static constexpr double forward_share = 1.0 / 3;

  /// `model` has the options that `uses` was recorded with.
  StandIn(Gpt model, std::vector<RecordedUse> uses);

  /// How long forward and backward together take the device: `forward_share` of it, and the rest.
  void set_compute_seconds(double seconds) { compute_seconds_ = seconds; }

  /// The sum of what was read: depends on the parameters alone. The device may not have come to it yet.
  at::Tensor forward();

  /// The same computation in the same order, and nothing else.
  double bare_compute_seconds();

  std::int64_t elements() const { return elements_; }

 private:
  Gpt model_;
  std::vector<at::Tensor> parameters_;
  const std::vector<RecordedUse> uses_;
  std::int64_t elements_ = 0;
  double compute_seconds_ = 0;
};

}  // namespace terrace
