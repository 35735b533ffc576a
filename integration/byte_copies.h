/// Copies bytes between memory of the host and of a session's device, and makes tensors there.
///
/// For what a session moves itself, now and then: parameters and buffers that come under management or leave it,
/// checkpoints, gradients that give up their place. Chunks are moved by the transfer service.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace terrace {

/// Returns when the bytes are there. Where a CUDA device takes part they are copied by LibTorch, on the thread's
/// current stream: after what the program has issued there, and before what it issues next.
void copy_bytes(void* to, c10::Device to_device, const void* from, c10::Device from_device, std::uint64_t bytes);

/// A tensor of the type, shape and strides of `like`, with a storage of its own on `device` that has a size and no
/// memory yet.
at::Tensor tensor_without_memory(const at::Tensor& like, c10::Device device);
/// The same, of another type.
at::Tensor tensor_without_memory(const at::Tensor& like, at::ScalarType type, c10::Device device);

/// Memory from LibTorch's allocator for the device, which counts it as it does the program's.
c10::DataPtr allocate_like_the_program(c10::Device device, std::uint64_t bytes);

}  // namespace terrace
