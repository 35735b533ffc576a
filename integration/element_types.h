/// LibTorch's types of elements as the update knows them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "optimizer/element_type.h"

namespace terrace {

/// Of float32 or bfloat16, which are the types that are trained.
inline ElementType element_type(c10::ScalarType type) {
  return type == c10::ScalarType::Float ? ElementType::float32 : ElementType::bfloat16;
}

/// What gradients of a parameter are summed up in. `in_float32`: as `optimizer.accumulate` asks for, where it differs.
inline c10::ScalarType gradient_type(c10::ScalarType parameter, bool in_float32) {
  return in_float32 && parameter == c10::ScalarType::BFloat16 ? c10::ScalarType::Float : parameter;
}

/// From now on LibTorch sums up the parameter's gradients in that type, also those that a tied one has in one graph,
/// and those of one that is frozen and will be trained. A gradient that is there is converted. Nothing happens for its
/// own type, in which LibTorch sums up anyway, and for what is no leaf.
void ask_for_gradients_of(c10::ScalarType type, const at::Tensor& parameter);

}  // namespace terrace
