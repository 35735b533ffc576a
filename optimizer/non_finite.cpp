#include "optimizer/non_finite.h"

namespace terrace {

NonFinite non_finite(std::string_view name) {
  if (name == "pass") {
    return NonFinite::pass;
  }
  if (name == "skip") {
    return NonFinite::skip;
  }
  if (name == "error") {
    return NonFinite::error;
  }
  throw ConfigError("optimizer: there is no way \"" + std::string(name) + "\" with gradients that are not finite",
                    "choose \"pass\", \"skip\" or \"error\"");
}

NonFiniteGradient non_finite_gradient(std::int64_t step, const std::string& parameter) {
  return NonFiniteGradient(
      "optimizer: step " + std::to_string(step) + " was not taken: the gradient of " + parameter + " is not finite",
      "lower the learning rate or the loss scale; optimizer.non_finite = \"skip\" goes on without such steps");
}

}  // namespace terrace
