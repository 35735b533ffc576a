#include "integration/byte_copies.h"

#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>

#include "integration/managed_storage.h"
#include "integration/pause.h"

namespace terrace {
namespace {

at::Tensor bytes_at(void* memory, c10::Device device, std::uint64_t bytes) {
  return at::for_blob(memory, {static_cast<std::int64_t>(bytes)})
      .target_device(device)
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .make_tensor();
}

}  // namespace

void copy_bytes(void* to, c10::Device to_device, const void* from, c10::Device from_device, std::uint64_t bytes) {
  if (bytes == 0) {
    return;
  }
  if (to_device.is_cpu() && from_device.is_cpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  const Pause pause;
  const at::NoGradGuard no_grad;
  // The source is only read.
  bytes_at(to, to_device, bytes).copy_(bytes_at(const_cast<void*>(from), from_device, bytes));
}

at::Tensor tensor_without_memory(const at::Tensor& like, c10::Device device) {
  return tensor_without_memory(like, like.scalar_type(), device);
}

at::Tensor tensor_without_memory(const at::Tensor& like, at::ScalarType type, c10::Device device) {
  const std::size_t bytes = storage_of(like).nbytes() / like.element_size() * c10::elementSize(type);
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
                                            /*allocator=*/nullptr, /*resizable=*/false);
  const c10::DispatchKeySet lazy_bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const c10::DispatchKeySet keys =
      c10::DispatchKeySet(c10::computeDispatchKey(type, like.layout(), device)) | (like.key_set() & lazy_bits);
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys, c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

c10::DataPtr allocate_like_the_program(c10::Device device, std::uint64_t bytes) {
  const c10::DeviceGuard guard(device);
  return c10::GetAllocator(device.type())->allocate(bytes);
}

}  // namespace terrace
