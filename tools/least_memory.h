/// What training a GPT takes at least, as its configuration tells: a budget that is far too small is refused before
/// anything is built, with most of what it lacks named at once. Once a step has run, MemoryUsage::needed tells exactly.
#pragma once

#include <cstdint>

#include "base/config.h"
#include "memory/usage.h"

namespace terrace {

/// Of the model that `config` describes, or the most that there can be of them. Takes no time for any number of layers.
std::int64_t count_parameters(const Config::Model& model);

/// Bytes on the device at one moment of a step that cannot be done without: what backward needs of each layer, or of
/// one and the inputs of the others where blocks are recomputed, and what is computed from it. Nearly all that a step
/// takes.
std::uint64_t least_device_bytes(const Config& config);

/// Throws OutOfMemory, with what it takes at least, if the budget of the device, the host or NVMe is less. `usage`
/// is that of a session which has no model yet, and `bytes_of_parameter` what the training state of each takes.
void require_least_memory(const Config& config, std::uint64_t bytes_of_parameter, const MemoryUsage& usage);

/// The same for training without a session, all in memory.
void require_available_memory(std::uint64_t state_bytes, std::uint64_t available_bytes);

}  // namespace terrace
