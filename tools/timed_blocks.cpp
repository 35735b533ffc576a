#include "tools/timed_blocks.h"

#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "integration/block.h"

namespace terrace {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::int64_t ends_after(double seconds) { return monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9); }

struct TimedBlock : torch::autograd::Function<TimedBlock> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t saved_bytes,
                            double forward_seconds, double backward_seconds) {
    const std::int64_t ends_ns = ends_after(forward_seconds);
    const at::Tensor saved = at::full({saved_bytes / static_cast<std::int64_t>(sizeof(float))}, kValue);
    context->save_for_backward({saved});
    context->saved_data["seconds"] = backward_seconds;
    const at::Tensor y = x + saved[0];
    sleep_until(ends_ns);
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor saved = context->get_saved_variables()[0];
    const std::int64_t ends_ns = ends_after(context->saved_data["seconds"].toDouble());
    if (saved[0].item<float>() != kValue || saved[-1].item<float>() != kValue) {
      throw LogicError("bench: what a block saved came back changed");
    }
    const at::Tensor gradient = gradients[0] + 0;
    sleep_until(ends_ns);
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }

  static constexpr float kValue = 0.5F;
};

}  // namespace

TimedBlocks::TimedBlocks(std::vector<BlockProfile> blocks)
    : blocks_(std::move(blocks)), weight_(register_parameter("weight", at::ones({1}))) {}

at::Tensor TimedBlocks::forward() {
  at::Tensor x = weight_ * 1;
  for (const BlockProfile& profile : blocks_) {
    x = block(
        [profile](const at::Tensor& input) {
          return TimedBlock::apply(input, static_cast<std::int64_t>(profile.saved_bytes), profile.forward_seconds,
                                   profile.backward_seconds);
        },
        x);
  }
  return x;
}

}  // namespace terrace
