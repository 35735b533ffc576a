#include "integration/vector_functions.h"

#include <mutex>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace terrace {

void settle_vector_functions() {
  static std::once_flag once;
  std::call_once(once, [] {
    const at::NoGradGuard no_graph;
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const at::Tensor half = at::full({1}, 0.5, at::TensorOptions().dtype(type).device(at::kCPU));
      // In the order of ATen/cpu/vml.h. A tensor of one number is one thread's.
      for (const auto function : {&at::Tensor::acos, &at::Tensor::asin, &at::Tensor::atan, &at::Tensor::cos,
                                  &at::Tensor::erf, &at::Tensor::erfc, &at::Tensor::erfinv, &at::Tensor::exp,
                                  &at::Tensor::log, &at::Tensor::log10, &at::Tensor::sin, &at::Tensor::sqrt,
                                  &at::Tensor::tan, &at::Tensor::tanh, &at::Tensor::trunc, &at::Tensor::log2}) {
        (half.*function)();
      }
    }
  });
}

}  // namespace terrace
