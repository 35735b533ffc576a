/// A unit of a model that the plan may keep, offload or recompute.
///
///     x = terrace::block([layer](at::Tensor x) { return layer->forward(x); }, x);
///
/// The function must depend on nothing that changes between forward and backward but its inputs and the
/// parameters it uses. Without a session, and where the plan keeps activations, it is called straight
/// through.
#pragma once

#include <utility>

namespace terrace {

/// Returns what `function(inputs...)` returns.
template <class Function, class... Inputs>
auto block(Function&& function, Inputs&&... inputs) {
  return std::forward<Function>(function)(std::forward<Inputs>(inputs)...);
}

}  // namespace terrace
