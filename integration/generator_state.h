/// The state of LibTorch's default random generators, to draw the same numbers again: the CPU's, and that of the device
/// which the session that lives computes on.
///
/// A plain value, copied without making tensors. Any thread.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/Device.h>

namespace terrace {

class GeneratorState {
 public:
  /// The generators' state now.
  static GeneratorState now();
  void restore() const;
  bool operator==(const GeneratorState& other) const;

  /// Where the program computes, from now on.
  static void set_device(c10::Device device) noexcept;

 private:
  /// Of a generator that counts what it has drawn.
  struct Counting {
    c10::Device device;
    std::uint64_t seed;
    std::uint64_t offset;

    bool operator==(const Counting&) const = default;
  };

  at::mt19937 engine_;
  std::optional<float> next_float_;  // normal numbers are made in pairs
  std::optional<double> next_double_;
  std::optional<Counting> on_device_;
};

/// The generators stand at `state` when this is made, and afterwards where they stood before.
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
