/// One parameter under management: its tensor, its run of a chunk, and the run of its gradient.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "integration/managed_storage.h"

namespace terrace {

struct ParkedGradient;

struct ManagedParameter {
  std::string name;
  std::vector<std::string> aliases;  ///< further names in the module, of a tied parameter
  at::Tensor tensor;
  std::shared_ptr<ManagedStorage> storage;
  std::uint32_t chunk_set = 0;  ///< index shared by the chunks of all kinds
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;

  std::optional<ChunkId> gradient_chunk;   ///< absent for a parameter that needs no gradient
  std::weak_ptr<ManagedStorage> gradient;  ///< the storage of the gradient made last, while it lives
  /// Hooks hang on it. The storage keeps it: where the program replaces the storage, perhaps by one of another shape,
  /// LibTorch makes another.
  std::weak_ptr<torch::autograd::Node> accumulator;
  std::shared_ptr<ParkedGradient> parked;  ///< what the hooks share

  /// Throws LogicError, naming the parameter, if its tensor has no dense storage of its own on the CPU or the session's
  /// device.
  void require_manageable(c10::Device session_device) const;

  const void* optimizer = nullptr;  ///< whose states its chunks hold, while that optimizer lives
  std::int64_t updates = 0;         ///< by that optimizer
};

}  // namespace terrace
