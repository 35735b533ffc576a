/// The state of LibTorch's default random generator, to draw the same numbers again.
///
/// A plain value, copied without making tensors. Any thread.
#pragma once

#include <optional>

#include <ATen/core/MT19937RNGEngine.h>

namespace terrace {

class GeneratorState {
 public:
  /// The generator's state now.
  static GeneratorState now();
  void restore() const;

 private:
  at::mt19937 engine_;
  std::optional<float> next_float_;  // normal numbers are made in pairs
  std::optional<double> next_double_;
};

/// The generator stands at `state` when this is made, and afterwards where it stood before.
class GeneratorScope {
 public:
  explicit GeneratorScope(const GeneratorState& state) : before_(GeneratorState::now()) { state.restore(); }
  ~GeneratorScope() { before_.restore(); }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  const GeneratorState before_;
};

}  // namespace terrace
