#include "integration/element_types.h"

#include <utility>

#include <ATen/core/grad_mode.h>

namespace terrace {

void ask_for_gradients_of(c10::ScalarType type, const at::Tensor& parameter) {
  if (type == parameter.scalar_type() || !parameter.is_leaf() || parameter.grad_dtype() == type) {
    return;
  }
  const at::Tensor gradient = std::exchange(parameter.mutable_grad(), {});
  parameter.set_grad_dtype(type);
  if (gradient.defined()) {
    const at::NoGradGuard no_grad;
    parameter.mutable_grad() = gradient.to(type);
  }
}

}  // namespace terrace
