#include "tools/least_memory.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "integration/offloaded_activations.h"
#include "offload/page_blocks.h"
#include "tools/gpt.h"
#include "tools/saturating.h"

namespace terrace {
namespace {

constexpr std::uint64_t kBuiltBytes = sizeof(float);  // of an element, while the model is built
constexpr std::uint64_t kHeaderBytes = 64;            // of the block of a tensor

std::uint64_t element_bytes(const Config::Model& model) { return model.dtype == "bfloat16" ? 2 : sizeof(float); }

std::uint64_t gradient_bytes(const Config& config) {
  return config.optimizer.accumulate == "float32" ? sizeof(float) : element_bytes(config.model);
}

/// Parameters of one size.
struct Alike {
  Saturating elements;  ///< of each
  Saturating count;
};

/// All of the model: by kinds, as a configuration may ask for more layers than lists have room for.
std::vector<Alike> parameters_of(const Config::Model& model) {
  const auto width = static_cast<std::uint64_t>(model.width);
  const auto layers = static_cast<std::uint64_t>(model.layers);
  std::vector<Alike> all{{GptOptions::vocabulary * width, 1}, {static_cast<std::uint64_t>(model.sequence) * width, 1}};
  const auto add_norms = [&](std::uint64_t count) { all.push_back({width, 2 * count}); };
  const auto add_linears = [&](Saturating in, Saturating out) {
    all.push_back({in * out, layers});
    all.push_back({out, layers});
  };
  add_norms(2 * layers);
  add_linears(width, 3 * width);
  add_linears(width, width);
  add_linears(width, 4 * width);
  add_linears(4 * width, width);
  add_norms(1);
  return all;
}

Saturating elements_of(const Config::Model& model) {
  Saturating elements = 0;
  for (const Alike& alike : parameters_of(model)) elements = elements + alike.count * alike.elements;
  return elements;
}

Saturating largest_elements(const Config::Model& model) {
  Saturating most = 0;
  for (const Alike& alike : parameters_of(model)) most = std::max(most, alike.elements);
  return most;
}

/// Of each parameter, its gradient and its states, what is to rest on that tier whatever else there is.
std::uint64_t bytes_told_to_rest(const Config& config, std::uint64_t bytes_of_parameter, Tier tier) {
  const auto bytes_if_all = [&](const std::optional<Config::Shares>& shares, std::uint64_t bytes) {
    const bool all = shares && (tier == Tier::host ? shares->host : shares->nvme) == 1;
    return all ? bytes : 0;
  };
  const std::uint64_t parameter = element_bytes(config.model);
  const std::uint64_t gradient = gradient_bytes(config);
  return bytes_if_all(config.placement.parameters, parameter) + bytes_if_all(config.placement.gradients, gradient) +
         bytes_if_all(config.placement.optimizer, bytes_of_parameter - parameter - gradient);
}

Saturating rounded_to_pages(Saturating bytes) {
  const bool has_room = bytes < Saturating::most / 2;  // to round up in
  return has_room ? PageBlocks::rounded(bytes.value()) : Saturating::most;
}

/// What the host's budget counts while all of the model lies there in tensors.
Saturating built_bytes(const Config::Model& model) {
  Saturating bytes = 0;
  for (const Alike& alike : parameters_of(model)) {
    bytes = bytes + alike.count * rounded_to_pages(alike.elements * kBuiltBytes + kHeaderBytes);
  }
  return bytes;
}

}  // namespace

std::int64_t count_parameters(const Config::Model& model) {
  constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(std::min(elements_of(model).value(), most));
}

std::uint64_t least_device_bytes(const Config& config) {
  const Config::Model& model = config.model;
  const Saturating tokens = static_cast<std::uint64_t>(config.train.micro_batch * model.sequence);
  const Saturating layers = static_cast<std::uint64_t>(model.layers);
  const Saturating width = static_cast<std::uint64_t>(model.width);
  const Saturating stream = tokens * width * element_bytes(model);  // [B, T, W]
  // Backward of a layer needs its input, what the first norm gives, queries, keys and values, what attention gives, the
  // sum with the input, what the second norm gives, and four times the width before gelu and after it.
  constexpr std::uint64_t of_layer = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4;
  const std::string& activations = config.placement.activations;
  const bool recomputes = activations == "recompute";
  const bool keeps = activations == "keep";
  // What is small stays.
  const auto stays = [&](std::uint64_t streams) -> Saturating {
    const bool leaves = !keeps && streams * stream >= OffloadedActivations::smallest_that_leaves;
    return leaves ? 0 : streams * stream;
  };
  const Saturating kept = layers * (recomputes ? stays(1) : 5 * stays(1) + stays(3) + 2 * stays(4));
  const Saturating logits = tokens * GptOptions::vocabulary * sizeof(float);
  // When forward ends: the last norm's input and output; logits, and their softmax.
  const Saturating after_forward = kept + 2 * stream + 2 * logits;
  // When backward has begun with the last layer: the gradients of its output and of gelu's, and that of the last
  // matrix, which is added to the one in the gradient chunk.
  const Saturating matrix_gradient = 4 * width * width * (element_bytes(model) + gradient_bytes(config));
  // Of a layer that has run again, its input counts as kept. With one head a stream less was seen, here and below.
  const Saturating in_backward = kept + (recomputes ? of_layer - 2 + 5 : 5) * stream + matrix_gradient;
  // When it goes on with gelu: the gradients of its output and its input, its input where that had left, and the
  // gradient of the sum beside it. Where blocks are recomputed there is less than before.
  const Saturating in_gelu = kept + (recomputes ? 0 : stays(4) > 0 ? 8 : 12) * stream;
  return std::max({after_forward, in_backward, in_gelu}).value();
}

void require_least_memory(const Config& config, std::uint64_t bytes_of_parameter, const MemoryUsage& usage) {
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
  const std::uint64_t nvme = usage.capacity(Tier::nvme);
  const bool has_nvme = nvme > 0;
  const Saturating elements = elements_of(config.model);
  const std::uint64_t state_bytes = (elements * bytes_of_parameter).value();
  // All of the model is built on the host, from where it can leave for NVMe; what training needs more may rest on the
  // device too, as the gradient may that counts in what a step takes.
  const Saturating resting_on_device =
      (device - least_device) + 4 * Saturating(config.model.width) * config.model.width * gradient_bytes(config);
  const std::uint64_t beside_device = state_bytes - std::min(state_bytes, resting_on_device.value());
  const Saturating built = has_nvme ? elements * kBuiltBytes : built_bytes(config.model);
  const Saturating on_both = usage.now(Tier::host) + std::max<Saturating>(built, beside_device);
  // An update has all of a chunk on the host, and no tensor is in two chunks.
  const std::uint64_t resting = bytes_told_to_rest(config, bytes_of_parameter, Tier::host);
  const Saturating update =
      usage.now(Tier::host) + elements * resting + largest_elements(config.model) * (bytes_of_parameter - resting);
  const std::uint64_t on_host = (has_nvme ? update : std::max(on_both, update)).value();
  if (usage.capacity(Tier::host) < on_host) {
    throw OutOfMemory("host: " +
                          (has_nvme ? std::string("an update of the largest matrix, beside what rests there,")
                                    : "a training state of " + format_bytes(state_bytes)) +
                          " takes at least " + format_bytes(on_host) + " of the host, in a budget of " +
                          format_bytes(usage.capacity(Tier::host)),
                      "raise host.memory to at least " + format_bytes_exactly(on_host) +
                          (has_nvme ? "" : ", or give nvme.paths, where what does not fit can go"));
  }
  const std::uint64_t host = usage.capacity(Tier::host);
  const Saturating on_nvme = std::max<Saturating>(elements * bytes_told_to_rest(config, bytes_of_parameter, Tier::nvme),
                                                  on_both.value() - std::min(host, on_both.value()));
  if (nvme < on_nvme) {
    const Saturating setting = config.nvme.memory.value_or(nvme) + Saturating(on_nvme.value() - nvme);
    throw OutOfMemory("nvme: a training state of " + format_bytes(state_bytes) + " takes at least " +
                          format_bytes(on_nvme.value()) + " of NVMe beside device and host, in a budget of " +
                          format_bytes(nvme),
                      "raise nvme.memory to at least " + format_bytes_exactly(setting.value()));
  }
}

void require_available_memory(std::uint64_t state_bytes, std::uint64_t available_bytes) {
  if (state_bytes <= available_bytes) return;
  throw OutOfMemory("host: a training state of " + format_bytes(state_bytes) + " is to be in memory, of which " +
                        format_bytes(available_bytes) + " are available",
                    "train without --unmanaged, with nvme.paths, where what does not fit can go");
}

}  // namespace terrace
