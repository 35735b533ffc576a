/// What Terrace asks of CUDA's driver, for one device: memory, streams, events, and address ranges over physical
/// memory.
///
/// A seam: the real driver stands behind it in loaded_cuda_driver.h, one in software in the tests. No header of CUDA's
/// is needed here; a handle is a pointer to what CUDA itself calls so, and the same as LibTorch's.
///
/// Calls come from any thread and leave the thread's current context as it was. A call that fails throws OutOfMemory
/// where memory is short, else IoError, with CUDA's own name for the error; one may report a failure of work that was
/// issued long before. Those that are noexcept log it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

struct CUstream_st;
struct CUevent_st;

namespace terrace {

using CudaStream = CUstream_st*;  ///< null is the default stream
using CudaEvent = CUevent_st*;

/// Physical memory of the device, which has no address until it is mapped.
enum class CudaMemory : std::uint64_t {};

struct CudaProperties {
  std::string name;         ///< "NVIDIA H100 80GB HBM3"
  int compute_major = 0;    ///< of its compute capability
  int compute_minor = 0;    ///< likewise
  int device_count = 0;     ///< that this process sees; the driver's is the first of them
  std::string pci_address;  ///< "0000:1b:00.0"
};

/// As the whole machine sees the device: what other processes use is not free.
struct CudaMemoryInfo {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

class CudaDriver {
 public:
  virtual ~CudaDriver() = default;

  virtual CudaProperties properties() = 0;
  virtual CudaMemoryInfo memory_info() = 0;

  /// A stream that waits for no other unless it is told to.
  virtual CudaStream create_stream() = 0;
  virtual void destroy_stream(CudaStream stream) noexcept = 0;
  /// Blocks until the stream has done all that was issued to it.
  virtual void synchronize(CudaStream stream) = 0;
  /// What is issued to the stream from now on waits for what the event has recorded by now.
  virtual void make_wait(CudaStream stream, CudaEvent event) = 0;

  /// An event without timing, whose waiters sleep.
  virtual CudaEvent create_event() = 0;
  virtual void destroy_event(CudaEvent event) noexcept = 0;
  /// The event stands for what has been issued to the stream so far, in place of what it stood for.
  virtual void record(CudaEvent event, CudaStream stream) = 0;
  virtual bool reached(CudaEvent event) = 0;
  virtual void synchronize(CudaEvent event) = 0;

  // Issued to the stream. Host memory that is not registered is taken too.
  virtual void copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, CudaStream stream) = 0;
  virtual void copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, CudaStream stream) = 0;
  virtual void fill(std::byte* device, std::byte value, std::uint64_t bytes, CudaStream stream) = 0;

  /// Locks host memory in place, for all contexts.
  virtual void register_host(std::span<std::byte> host) = 0;
  virtual void unregister_host(std::span<std::byte> host) noexcept = 0;

  /// Sizes of memory and of address ranges are multiples of it.
  virtual std::uint64_t granularity() = 0;
  virtual CudaMemory create_memory(std::uint64_t bytes) = 0;
  /// It is given back to the system when it is mapped nowhere any more.
  virtual void release_memory(CudaMemory memory) noexcept = 0;
  virtual std::byte* reserve_addresses(std::uint64_t bytes) = 0;
  /// The same range as was reserved, with nothing mapped in it.
  virtual void free_addresses(std::byte* address, std::uint64_t bytes) noexcept = 0;
  virtual void map(std::byte* address, std::uint64_t bytes, CudaMemory memory) = 0;
  /// What is mapped in the range may be read and written by the device.
  virtual void allow_access(std::byte* address, std::uint64_t bytes) = 0;
  /// Whole mappings only, which no work that was issued still uses.
  virtual void unmap(std::byte* address, std::uint64_t bytes) = 0;
};

/// "device: cuMemCreate (2MiB) failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY)", as the error that fits `name`.
[[noreturn]] void throw_cuda_error(std::string_view what, std::string_view name, std::string_view text);

}  // namespace terrace
