#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace terrace {

/// A module's buffer under management: it stays on the device, counted as such.
struct ManagedBuffer {
  std::string name;
  at::Tensor tensor;
};

}  // namespace terrace
