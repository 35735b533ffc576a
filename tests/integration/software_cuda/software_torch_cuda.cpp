#include "tests/integration/software_cuda/software_torch_cuda.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "integration/managed_storage.h"
#include "offload/loaded_cuda_driver.h"

namespace at {
namespace {

const c10::Device cuda(c10::DeviceType::CUDA, 0);

/// Counts; it draws nothing, as kernels here draw from the CPU's.
struct CountingGenerator final : c10::GeneratorImpl {
  CountingGenerator() : GeneratorImpl(cuda, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override { return seed_ = 1; }
  void set_state(const c10::TensorImpl& state) override {
    const auto* const words = static_cast<const std::uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::detail::empty_cpu({16}, kByte);
    auto* const words = static_cast<std::uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override { return new CountingGenerator(*this); }
  CountingGenerator(const CountingGenerator& other)
      : GeneratorImpl(cuda, c10::DispatchKeySet(c10::DispatchKey::CUDA)), seed_(other.seed_), offset_(other.offset_) {}

  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
};

/// LibTorch finds it by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs /*unused*/) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*index*/) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex /*index*/) const override {}
  DeviceIndex exchangeDevice(DeviceIndex /*index*/) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex /*index*/) const override { return 0; }
  const Generator& getDefaultGenerator(DeviceIndex /*index*/) const override {
    static const Generator generator = make_generator<CountingGenerator>();
    return generator;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

/// One device, whose only stream is the default one.
struct CudaGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device /*to*/) const override { return cuda; }
  c10::Device getDevice() const override { return cuda; }
  void setDevice(c10::Device /*to*/) const override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*of*/) const override { return c10::Stream(c10::Stream::DEFAULT, cuda); }
  c10::Stream getDefaultStream(c10::Device /*of*/) const override { return getStream(cuda); }
  c10::Stream exchangeStream(c10::Stream /*to*/) const override { return getStream(cuda); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** /*event*/, const c10::Stream& /*stream*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {}
};
const CudaGuard guard;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

// ---- Kernels

/// A tensor on the CPU over the same bytes, of which nothing is read before the op is known to touch them.
Tensor on_cpu(const Tensor& tensor, bool touches_bytes) {
  c10::StorageImpl& storage = terrace::storage_of(tensor);
  void* const data = touches_bytes && tensor.numel() > 0 ? const_cast<void*>(storage.data())
                                                         : storage._mutable_data_ptr_no_checks().get();
  auto on_cpu = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                      c10::DataPtr(data, c10::DeviceType::CPU),
                                                      c10::GetAllocator(c10::DeviceType::CPU), storage.resizable());
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(on_cpu)),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return result;
}

Tensor on_cuda(c10::Storage storage, const Tensor& like) {
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return result;
}

/// The tensors of a call, as the device's and as the CPU's.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) {
    for (const c10::Argument& result : schema.returns()) {
      is_view_ = is_view_ || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    }
  }

  c10::IValue argument(const c10::IValue& value) {
    if (value.isTensor()) {
      return argument(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(argument(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
        list.push_back(each ? std::optional(argument(*each)) : std::nullopt);
      }
      return list;
    }
    return value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::CPU)) : value;
  }

  c10::IValue result(const c10::IValue& value) const {
    if (value.isTensor()) {
      return result(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(result(each));
      return list;
    }
    return value;
  }

 private:
  Tensor argument(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      given_.push_back(tensor);
      return tensor;
    }
    pairs_.emplace_back(tensor, on_cpu(tensor, !is_view_));
    return pairs_.back().second;
  }

  Tensor result(const Tensor& tensor) const {
    if (!tensor.defined()) {
      return tensor;
    }
    for (const Tensor& each : given_) {
      if (each.is_same(tensor)) return tensor;
    }
    for (const auto& [on_device, on_host] : pairs_) {
      if (on_host.is_same(tensor)) {
        take_over_size(on_device, on_host);
        return on_device;
      }
    }
    for (const auto& [on_device, on_host] : pairs_) {
      if (on_host.storage().is_alias_of(tensor.storage())) return on_cuda(on_device.storage(), tensor);
    }
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         c10::GetAllocator(c10::DeviceType::CUDA), /*resizable=*/true);
    std::memcpy(storage.mutable_data(), tensor.storage().data(), tensor.storage().nbytes());
    return on_cuda(std::move(storage), tensor);
  }

  /// An op may have resized what it was given to write to.
  static void take_over_size(const Tensor& on_device, const Tensor& on_host) {
    c10::StorageImpl& to = terrace::storage_of(on_device);
    const c10::StorageImpl& from = terrace::storage_of(on_host);
    if (to.nbytes() != from.nbytes()) {
      c10::DataPtr data = c10::GetAllocator(c10::DeviceType::CUDA)->allocate(from.nbytes());
      std::memcpy(data.mutable_get(), from.data(), from.nbytes());
      to.set_data_ptr_noswap(std::move(data));
      to.set_nbytes(from.nbytes());
    }
    if (on_device.sizes() != on_host.sizes() || on_device.strides() != on_host.strides()) {
      on_device.unsafeGetTensorImpl()->set_sizes_and_strides(on_host.sizes(), on_host.strides());
    }
  }

  bool is_view_ = false;
  std::vector<Tensor> given_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  Call call(op.schema());
  const std::size_t first = stack->size() - op.schema().arguments().size();
  for (std::size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.argument((*stack)[i]);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (std::size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.result((*stack)[i]);
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<Layout> /*layout*/,
             std::optional<Device> /*device*/, std::optional<bool> /*pin*/, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::CUDA),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef strides, std::optional<ScalarType> type,
                     std::optional<Layout> /*layout*/, std::optional<Device> /*device*/, std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(size, strides, c10::GetAllocator(c10::DeviceType::CUDA),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  // For all devices there is one, which looks for a kernel of the device's.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

std::int64_t choose_plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                                    bool, std::optional<double>, bool) {
  return static_cast<std::int64_t>(sdp::SDPBackend::math);
}

const bool attention_is_chosen = [] {
  native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_plain_attention);
  return true;
}();

}  // namespace
}  // namespace at
