#include "integration/checkpoint_tensors.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "base/error.h"
#include "integration/pause.h"

namespace terrace {
namespace {

using RecordKind = CheckpointRecord::Kind;

/// Null for types that checkpoints do not know.
const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kUInt16:
      return "uint16";
    case at::kUInt32:
      return "uint32";
    case at::kUInt64:
      return "uint64";
    case at::kBool:
      return "bool";
    default:
      return nullptr;
  }
}

CheckpointRecord record_of(const std::string& name, RecordKind kind, const at::Tensor& tensor) {
  CheckpointRecord record;
  record.name = name;
  record.kind = kind;
  record.shape = tensor.sizes().vec();
  const char* const dtype = dtype_name(tensor.scalar_type());
  if (dtype == nullptr) {
    throw LogicError(
        "'" + name + "' cannot be saved: a checkpoint has no name for the type " + c10::toString(tensor.scalar_type()),
        "convert it");
  }
  record.dtype = dtype;
  return record;
}

/// Where in memory, in bytes from the first element, the element is that lies at `offset` in the order of the shape.
std::int64_t position_of(const at::Tensor& buffer, std::uint64_t offset) {
  const auto element_bytes = static_cast<std::int64_t>(buffer.element_size());
  std::int64_t index = static_cast<std::int64_t>(offset) / element_bytes;
  std::int64_t position = 0;
  for (std::int64_t dimension = buffer.dim() - 1; dimension >= 0; --dimension) {
    position += index % buffer.size(dimension) * buffer.stride(dimension);
    index /= buffer.size(dimension);
  }
  return position * element_bytes;
}

}  // namespace

CheckpointRecord record_of(const ManagedParameter& parameter, RecordKind kind, StateFormat states) {
  CheckpointRecord record = record_of(parameter.name, kind, parameter.tensor);
  record.strides = parameter.tensor.strides().vec();
  if (kind == RecordKind::parameter) {
    record.updates = *parameter.updates;
    record.updated_by = parameter.updated_by;
    record.aliases = parameter.aliases;
  } else if (kind == RecordKind::master) {
    record.dtype = states == StateFormat::float32 ? "float32" : "uint16";  // or the lower halves
  } else {
    record.dtype = moment_type(states) == ElementType::float32 ? "float32" : "bfloat16";
  }
  return record;
}

CheckpointRecord record_of(const ManagedBuffer& buffer) {
  if (buffer.tensor.layout() != at::kStrided || (!buffer.tensor.is_cpu() && !buffer.tensor.is_cuda())) {
    throw LogicError("buffer '" + buffer.name + "' cannot be saved: it is not dense, or not on the session's device",
                     "keep it outside the module, or convert it");
  }
  CheckpointRecord record = record_of(buffer.name, RecordKind::buffer, buffer.tensor);
  const auto strides = c10::contiguous_strides(buffer.tensor.sizes());
  record.strides.assign(strides.begin(), strides.end());
  return record;
}

std::optional<ChunkId> chunk_of(const ChunkSet& set, RecordKind kind) {
  switch (kind) {
    case RecordKind::parameter:
      return set.parameter;
    case RecordKind::master:
      return set.master;
    case RecordKind::momentum:
      return set.momentum;
    case RecordKind::variance:
      return set.variance;
    default:
      return std::nullopt;
  }
}

std::span<std::byte> run_at(const Pin& pin, const ManagedParameter& parameter, const CheckpointRecord& record,
                            std::uint64_t offset) {
  const std::uint64_t element_bytes = checkpoint_dtype_bytes(record.dtype).value();
  const std::uint64_t run_bytes = parameter.elements * element_bytes;
  const std::span<std::byte> piece = pin.host_bytes(0, parameter.element_offset * element_bytes + offset);
  return piece.first(std::min<std::uint64_t>(piece.size(), run_bytes - offset));
}

void copy_out(const at::Tensor& buffer, std::uint64_t offset, std::span<std::byte> elements) {
  const auto* const data = static_cast<const std::byte*>(buffer.const_data_ptr());
  const std::size_t element_bytes = buffer.element_size();
  for (std::size_t done = 0; done < elements.size(); done += element_bytes) {
    std::memcpy(elements.data() + done, data + position_of(buffer, offset + done), element_bytes);
  }
}

void copy_in(const at::Tensor& buffer, std::uint64_t offset, std::span<const std::byte> elements) {
  auto* const data = static_cast<std::byte*>(buffer.mutable_data_ptr());
  const std::size_t element_bytes = buffer.element_size();
  for (std::size_t done = 0; done < elements.size(); done += element_bytes) {
    std::memcpy(data + position_of(buffer, offset + done), elements.data() + done, element_bytes);
  }
}

std::string default_generator_name(c10::Device device) { return device.is_cpu() ? "cpu" : "cuda"; }

at::Tensor on_cpu(const at::Tensor& buffer) {
  const Pause pause;  // the copy is not the program's
  const at::NoGradGuard no_grad;
  return buffer.to(at::kCPU);
}

at::Generator default_generator(c10::Device device) { return at::globalContext().defaultGenerator(device); }

at::Tensor default_generator_state(c10::Device device) {
  const Pause pause;  // the tensor is not the program's
  at::Generator generator = default_generator(device);
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

}  // namespace terrace
