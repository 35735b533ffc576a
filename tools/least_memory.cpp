#include "tools/least_memory.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "integration/offloaded_activations.h"
#include "offload/page_blocks.h"
#include "tools/gpt.h"

namespace terrace {
namespace {

constexpr std::uint64_t kBuiltBytes = sizeof(float);  // of an element, while the model is built
constexpr std::uint64_t kHeaderBytes = 64;            // of the block of a tensor

std::uint64_t element_bytes(const Config::Model& model) { return model.dtype == "bfloat16" ? 2 : sizeof(float); }

std::uint64_t gradient_bytes(const Config& config) {
  return config.optimizer.accumulate == "float32" ? sizeof(float) : element_bytes(config.model);
}

/// Elements of each parameter.
std::vector<std::uint64_t> parameter_sizes(const Config::Model& model) {
  const auto width = static_cast<std::uint64_t>(model.width);
  std::vector<std::uint64_t> sizes{GptOptions::vocabulary * width, static_cast<std::uint64_t>(model.sequence) * width};
  const auto add_norm = [&] { sizes.insert(sizes.end(), {width, width}); };
  const auto add_linear = [&](std::uint64_t in, std::uint64_t out) { sizes.insert(sizes.end(), {in * out, out}); };
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    add_norm();
    add_linear(width, 3 * width);
    add_linear(width, width);
    add_norm();
    add_linear(width, 4 * width);
    add_linear(4 * width, width);
  }
  add_norm();
  return sizes;
}

/// What the host's budget counts while all of the model lies there in tensors.
std::uint64_t built_bytes(const Config::Model& model) {
  const std::vector<std::uint64_t> sizes = parameter_sizes(model);
  return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}, [](std::uint64_t sum, std::uint64_t elements) {
    return sum + PageBlocks::rounded(elements * kBuiltBytes + kHeaderBytes);
  });
}

}  // namespace

std::int64_t count_parameters(const Config::Model& model) {
  const std::vector<std::uint64_t> sizes = parameter_sizes(model);
  return static_cast<std::int64_t>(std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}));
}

std::uint64_t least_device_bytes(const Config& config) {
  const Config::Model& model = config.model;
  const auto tokens = static_cast<std::uint64_t>(config.train.micro_batch * model.sequence);
  const auto layers = static_cast<std::uint64_t>(model.layers);
  const auto width = static_cast<std::uint64_t>(model.width);
  const std::uint64_t stream = tokens * width * element_bytes(model);  // [B, T, W]
  // Backward of a layer needs its input, what the first norm gives, queries, keys and values, what attention gives, the
  // sum with the input, what the second norm gives, and four times the width before gelu and after it.
  constexpr std::uint64_t of_layer = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4;
  const std::string& activations = config.placement.activations;
  const bool recomputes = activations == "recompute";
  // What is small stays.
  const auto stays = [&](std::uint64_t streams) {
    const bool leaves = activations != "keep" && streams * stream >= OffloadedActivations::smallest_that_leaves;
    return leaves ? 0 : streams * stream;
  };
  const std::uint64_t kept = layers * (recomputes ? stays(1) : 6 * stays(1) + stays(3) + 2 * stays(4));
  const std::uint64_t logits = tokens * GptOptions::vocabulary * sizeof(float);
  // When forward ends: the last norm's input and output; logits, and their softmax.
  const std::uint64_t after_forward = kept + 2 * stream + 2 * logits;
  // When backward has begun with the last layer: the gradients of its output and of gelu's, and that of the last
  // matrix, which is added to the one in the gradient chunk.
  const std::uint64_t matrix_gradient = 4 * width * width * (element_bytes(model) + gradient_bytes(config));
  const std::uint64_t in_backward = kept + (recomputes ? of_layer - 1 : 0) * stream + 5 * stream + matrix_gradient;
  return std::max(after_forward, in_backward);
}

void require_least_memory(const Config& config, std::uint64_t state_bytes, const MemoryUsage& usage) {
  const std::uint64_t least_device = least_device_bytes(config);
  const std::uint64_t device = usage.capacity(Tier::device);
  if (device < least_device) {
    const bool keeps = config.placement.activations == "keep";
    throw OutOfMemory(
        "device: a step takes at least " + format_bytes(least_device) + ", in a budget of " + format_bytes(device),
        "raise device.memory to at least " + format_bytes_exactly(least_device) +
            ", and a little more for what cannot be told before, " +
            (keeps ? "lower train.micro_batch, or set placement.activations = \"recompute\""
                   : "or lower train.micro_batch"));
  }
  if (usage.capacity(Tier::nvme) > 0) return;
  // Without NVMe all of the model is built on the host; training needs more, which may rest on the device too.
  const std::uint64_t beside_device = state_bytes - std::min(state_bytes, device - least_device);
  const std::uint64_t host = usage.now(Tier::host) + std::max(built_bytes(config.model), beside_device);
  if (usage.capacity(Tier::host) < host) {
    throw OutOfMemory("host: a training state of " + format_bytes(state_bytes) + " takes at least " +
                          format_bytes(host) + " of the host, in a budget of " +
                          format_bytes(usage.capacity(Tier::host)),
                      "raise host.memory to at least " + format_bytes_exactly(host) +
                          ", or give nvme.paths, where what does not fit can go");
  }
}

}  // namespace terrace
