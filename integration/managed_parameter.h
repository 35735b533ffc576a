/// One parameter under management: its tensor, its run of a chunk, and the run of its gradient.
#pragma once

#include <cstdint>
#include <functional>
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
  std::uint64_t number = 0;  ///< later ones under management have larger ones
  std::string name;
  std::vector<std::string> aliases;  ///< further names in the module, of a tied parameter
  at::Tensor tensor;
  std::shared_ptr<ManagedStorage> storage;
  std::uint32_t chunk_set = 0;  ///< index shared by the chunks of all kinds
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;

  std::optional<ChunkId> gradient_chunk;      ///< absent for a parameter that needs no gradient
  at::ScalarType gradient_type = at::kFloat;  ///< that gradients are summed up in
  std::weak_ptr<ManagedStorage> gradient;     ///< the storage of the gradient made last, while it lives
  /// Hooks hang on it. The storage keeps it: where the program replaces the storage, perhaps by one of another shape,
  /// LibTorch makes another.
  std::weak_ptr<torch::autograd::Node> accumulator;
  std::shared_ptr<ParkedGradient> parked;  ///< what the hooks share
  std::uint64_t accumulations = 0;         ///< backward passes that have made a gradient of it, or added to one

  /// Throws LogicError, naming the parameter, if its tensor has no dense storage of its own on the CPU or the session's
  /// device.
  void require_manageable(c10::Device session_device) const;

  const void* optimizer = nullptr;  ///< whose states its chunks hold, while that optimizer lives
  std::string updated_by;           ///< the kind of that optimizer, or of the one before a checkpoint
  /// By that optimizer, without skipped ones. Queued updates count it up, until the queue is finished.
  std::shared_ptr<std::int64_t> updates = std::make_shared<std::int64_t>(0);
  /// What happens before a gradient of a backward is added. May be empty.
  std::function<void()> before_accumulation;
  /// What happens once a gradient of a backward has been added and the program's own hooks have seen it. May be empty.
  std::function<void()> after_accumulation;

  /// Ends what an optimizer has made of it: the next begins anew. What is queued still counts for itself.
  void forget_updates();
};

}  // namespace terrace
