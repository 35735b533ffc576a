#include "integration/element_types.h"

#include <utility>

#include <ATen/core/grad_mode.h>

namespace terrace {

void ask_for_gradients_of(c10::ScalarType type, const at::Tensor& leaf) {
  if (leaf.grad_dtype() == type) {
    return;
  }
  const at::Tensor gradient = std::exchange(leaf.mutable_grad(), {});
  leaf.set_grad_dtype(type);
  if (gradient.defined()) {
    const at::NoGradGuard no_grad;
    leaf.mutable_grad() = gradient.to(type);
  }
}

}  // namespace terrace
