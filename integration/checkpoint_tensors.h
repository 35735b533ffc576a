/// How a session's tensors are described in a checkpoint, and where their bytes are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "integration/checkpoint_manifest.h"
#include "integration/managed_buffer.h"
#include "integration/managed_parameter.h"
#include "memory/access_stream.h"
#include "optimizer/update.h"

namespace terrace {

/// The name of LibTorch's default generator of a device: "cpu" or "cuda".
std::string default_generator_name(c10::Device device);

/// The record of a parameter's run in its chunk of one kind, without what only writing it tells. Throws LogicError if
/// its type has no name in a checkpoint.
CheckpointRecord record_of(const ManagedParameter& parameter, CheckpointRecord::Kind kind, StateFormat states);
/// Throws LogicError also if the buffer is not dense, or not on the CPU or a CUDA device.
CheckpointRecord record_of(const ManagedBuffer& buffer);

/// The kinds of which a parameter may have a run in a chunk of its own.
inline constexpr std::array kinds_in_chunks{CheckpointRecord::Kind::parameter, CheckpointRecord::Kind::master,
                                            CheckpointRecord::Kind::momentum, CheckpointRecord::Kind::variance};
/// The chunk of one of these kinds, where the set has it.
std::optional<ChunkId> chunk_of(const ChunkSet& set, CheckpointRecord::Kind kind);

/// The bytes from `offset` of a run, as many as follow each other on the host, where `pin` holds the chunk alone.
std::span<std::byte> run_at(const Pin& pin, const ManagedParameter& parameter, const CheckpointRecord& record,
                            std::uint64_t offset);

/// Room for elements of a buffer that do not follow each other: on the stack, as a session may have none to spare on
/// the host, and a whole number of elements of any type.
using ElementsPiece = std::array<std::byte, 16 * 1024>;
/// Copies the bytes from `offset` of a buffer's elements, in the order of its shape. Both are whole elements.
void copy_out(const at::Tensor& buffer, std::uint64_t offset, std::span<std::byte> elements);
void copy_in(const at::Tensor& buffer, std::uint64_t offset, std::span<const std::byte> elements);

/// The buffer, or a copy of it that the CPU reaches: one at a time, beside the host's budget.
at::Tensor on_cpu(const at::Tensor& buffer);

/// LibTorch's default generator of a device, and its state in its own format.
at::Generator default_generator(c10::Device device);
at::Tensor default_generator_state(c10::Device device);

}  // namespace terrace
