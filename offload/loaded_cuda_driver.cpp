#include "offload/loaded_cuda_driver.h"

#include <exception>

#include "base/log.h"
#include "base/units.h"
#include "offload/cuda_library.h"

namespace terrace {
namespace {

CUdeviceptr address_of(const std::byte* device) { return reinterpret_cast<CUdeviceptr>(device); }
CUmemGenericAllocationHandle handle_of(CudaMemory memory) { return static_cast<CUmemGenericAllocationHandle>(memory); }
std::string sized(const char* call, std::uint64_t bytes) {
  return std::string(call) + " (" + format_bytes(bytes) + ")";
}

class LoadedCudaDriver final : public CudaDriver {
 public:
  /// Its device's primary context has been retained.
  LoadedCudaDriver(const CudaLibrary& library, CUdevice device, CUcontext context)
      : cuda_(library), device_(device), context_(context) {}
  ~LoadedCudaDriver() override { cuda_.cuDevicePrimaryCtxRelease(device_); }

  CudaProperties properties() override {
    CudaProperties properties;
    char text[256] = "";
    check(cuda_.cuDeviceGetName(text, sizeof text, device_), "cuDeviceGetName");
    properties.name = text;
    check(cuda_.cuDeviceGetPCIBusId(text, sizeof text, device_), "cuDeviceGetPCIBusId");
    properties.pci_address = text;
    check(cuda_.cuDeviceGetCount(&properties.device_count), "cuDeviceGetCount");
    properties.compute_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    properties.compute_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    return properties;
  }

  CudaMemoryInfo memory_info() override {
    const Current current(*this);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    check(cuda_.cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
    return {.free_bytes = free_bytes, .total_bytes = total_bytes};
  }

  CudaStream create_stream() override {
    const Current current(*this);
    CUstream stream = nullptr;
    check(cuda_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return stream;
  }
  void destroy_stream(CudaStream stream) noexcept override {
    quietly("cuStreamDestroy", [&] { return cuda_.cuStreamDestroy(stream); });
  }
  void synchronize(CudaStream stream) override {
    const Current current(*this);
    check(cuda_.cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
  void make_wait(CudaStream stream, CudaEvent event) override {
    const Current current(*this);
    check(cuda_.cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
  }

  CudaEvent create_event() override {
    const Current current(*this);
    CUevent event = nullptr;
    check(cuda_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC), "cuEventCreate");
    return event;
  }
  void destroy_event(CudaEvent event) noexcept override {
    quietly("cuEventDestroy", [&] { return cuda_.cuEventDestroy(event); });
  }
  void record(CudaEvent event, CudaStream stream) override {
    const Current current(*this);
    check(cuda_.cuEventRecord(event, stream), "cuEventRecord");
  }
  bool reached(CudaEvent event) override {
    const Current current(*this);
    const CUresult result = cuda_.cuEventQuery(event);
    if (result == CUDA_ERROR_NOT_READY) {
      return false;
    }
    check(result, "cuEventQuery");
    return true;
  }
  void synchronize(CudaEvent event) override {
    const Current current(*this);
    check(cuda_.cuEventSynchronize(event), "cuEventSynchronize");
  }

  void copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, CudaStream stream) override {
    const Current current(*this);
    check(cuda_.cuMemcpyHtoDAsync(address_of(device), host, bytes, stream), sized("cuMemcpyHtoDAsync", bytes));
  }
  void copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, CudaStream stream) override {
    const Current current(*this);
    check(cuda_.cuMemcpyDtoHAsync(host, address_of(device), bytes, stream), sized("cuMemcpyDtoHAsync", bytes));
  }
  void fill(std::byte* device, std::byte value, std::uint64_t bytes, CudaStream stream) override {
    const Current current(*this);
    check(cuda_.cuMemsetD8Async(address_of(device), std::to_integer<unsigned char>(value), bytes, stream),
          sized("cuMemsetD8Async", bytes));
  }

  void register_host(std::span<std::byte> host) override {
    const Current current(*this);
    check(cuda_.cuMemHostRegister(host.data(), host.size(), CU_MEMHOSTREGISTER_PORTABLE),
          sized("cuMemHostRegister", host.size()));
  }
  void unregister_host(std::span<std::byte> host) noexcept override {
    quietly("cuMemHostUnregister", [&] { return cuda_.cuMemHostUnregister(host.data()); });
  }

  std::uint64_t granularity() override {
    const Current current(*this);
    const CUmemAllocationProp on_device = memory_properties();
    std::size_t bytes = 0;
    check(cuda_.cuMemGetAllocationGranularity(&bytes, &on_device, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    return bytes;
  }
  CudaMemory create_memory(std::uint64_t bytes) override {
    const Current current(*this);
    const CUmemAllocationProp on_device = memory_properties();
    CUmemGenericAllocationHandle handle = 0;
    check(cuda_.cuMemCreate(&handle, bytes, &on_device, 0), sized("cuMemCreate", bytes));
    return static_cast<CudaMemory>(handle);
  }
  void release_memory(CudaMemory memory) noexcept override {
    quietly("cuMemRelease", [&] { return cuda_.cuMemRelease(handle_of(memory)); });
  }
  std::byte* reserve_addresses(std::uint64_t bytes) override {
    const Current current(*this);
    CUdeviceptr address = 0;
    check(cuda_.cuMemAddressReserve(&address, bytes, 0, 0, 0), sized("cuMemAddressReserve", bytes));
    return reinterpret_cast<std::byte*>(address);
  }
  void free_addresses(std::byte* address, std::uint64_t bytes) noexcept override {
    quietly("cuMemAddressFree", [&] { return cuda_.cuMemAddressFree(address_of(address), bytes); });
  }
  void map(std::byte* address, std::uint64_t bytes, CudaMemory memory) override {
    const Current current(*this);
    check(cuda_.cuMemMap(address_of(address), bytes, 0, handle_of(memory), 0), sized("cuMemMap", bytes));
  }
  void allow_access(std::byte* address, std::uint64_t bytes) override {
    const Current current(*this);
    CUmemAccessDesc access{};
    access.location = memory_properties().location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(cuda_.cuMemSetAccess(address_of(address), bytes, &access, 1), sized("cuMemSetAccess", bytes));
  }
  void unmap(std::byte* address, std::uint64_t bytes) override {
    const Current current(*this);
    check(cuda_.cuMemUnmap(address_of(address), bytes), sized("cuMemUnmap", bytes));
  }

 private:
  /// Makes the device's primary context the calling thread's, and at the end again the one that it had.
  class Current {
   public:
    explicit Current(LoadedCudaDriver& driver) : driver_(driver) {
      CUcontext current = nullptr;
      driver_.check(driver_.cuda_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
      if (current != driver_.context_) {
        driver_.check(driver_.cuda_.cuCtxPushCurrent(driver_.context_), "cuCtxPushCurrent");
        pushed_ = true;
      }
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      if (pushed_) {
        CUcontext popped = nullptr;
        driver_.cuda_.cuCtxPopCurrent(&popped);
      }
    }

   private:
    LoadedCudaDriver& driver_;
    bool pushed_ = false;
  };

  void check(CUresult result, std::string_view what) const {
    if (result != CUDA_SUCCESS) {
      throw_cuda_error(what, cuda_.name_of(result), cuda_.text_of(result));
    }
  }

  /// For what gives something back. At the end of the process the driver may be gone before us.
  template <class Call>
  void quietly(const char* what, Call&& call) noexcept {
    if (CUcontext context = nullptr; cuda_.cuCtxGetCurrent(&context) == CUDA_ERROR_DEINITIALIZED) {
      return;
    }
    try {
      const Current current(*this);
      check(call(), what);
    } catch (const std::exception& error) {
      log_once(what, LogLevel::error, error.what());
    }
  }

  int attribute(CUdevice_attribute which) const {
    int value = 0;
    check(cuda_.cuDeviceGetAttribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
  }

  CUmemAllocationProp memory_properties() const {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device_;
    return properties;
  }

  const CudaLibrary cuda_;
  const CUdevice device_;
  const CUcontext context_;
};

/// Null, with the reason in `why_not`.
std::shared_ptr<CudaDriver> load(std::string& why_not) {
  CudaLibrary cuda;
  why_not = cuda.load();
  if (!why_not.empty()) {
    return nullptr;
  }
  const auto refused = [&](const char* call, CUresult result) {
    if (result != CUDA_SUCCESS) {
      why_not = "the CUDA driver's " + std::string(call) + " failed: " + cuda.text_of(result) + " (" +
                cuda.name_of(result) + ")";
    }
    return result != CUDA_SUCCESS;
  };
  int count = 0;
  CUdevice device = 0;
  int has_address_ranges = 0;
  CUcontext context = nullptr;
  if (refused("cuInit", cuda.cuInit(0)) || refused("cuDeviceGetCount", cuda.cuDeviceGetCount(&count))) {
    return nullptr;
  }
  if (count == 0) {
    why_not = "the CUDA driver shows no device";
    return nullptr;
  }
  if (refused("cuDeviceGet", cuda.cuDeviceGet(&device, 0)) ||
      refused("cuDeviceGetAttribute",
              cuda.cuDeviceGetAttribute(&has_address_ranges, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                        device))) {
    return nullptr;
  }
  if (has_address_ranges == 0) {
    why_not = "the CUDA device has no virtual memory management";
    return nullptr;
  }
  if (refused("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(&context, device))) {
    return nullptr;
  }
  return std::make_shared<LoadedCudaDriver>(cuda, device, context);
}

}  // namespace

bool is_built_with_cuda() noexcept { return true; }

std::shared_ptr<CudaDriver> load_cuda_driver(std::string* why_not) {
  std::string reason;
  std::shared_ptr<CudaDriver> driver = load(reason);
  if (why_not != nullptr) {
    *why_not = reason;
  }
  return driver;
}

}  // namespace terrace
