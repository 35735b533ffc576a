/// CUDA's driver in software, for tests of what stands on it.
///
/// Device memory is pages of a file without a name, mapped where the driver is told to and out of reach elsewhere, so
/// that a stray access crashes. Every stream is a thread, so that work is late and out of order as on a GPU. A kernel
/// is a function. What the real driver would not forgive is a failure of the test: unmapping what queued work still
/// touches, copying to or from a range that is not mapped, freeing addresses with something mapped there, and what is
/// left over at the end. Thread-safe, but for faults: those are set while nothing runs.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "offload/cuda_driver.h"
#include "offload/device.h"

namespace terrace {

class SoftwareCuda final : public CudaDriver {
 public:
  struct Options {
    std::uint64_t memory_bytes = 64 << 20;
    std::uint64_t granule_bytes = 64 << 10;
    std::chrono::microseconds longest_delay{0};  ///< before each operation of a stream, at random
  };

  explicit SoftwareCuda(const Options& options);
  SoftwareCuda() : SoftwareCuda(Options()) {}
  ~SoftwareCuda() override;
  SoftwareCuda(const SoftwareCuda&) = delete;
  SoftwareCuda& operator=(const SoftwareCuda&) = delete;

  using Range = std::span<const std::byte>;
  /// Queues a function on a stream that touches some memory of the device.
  void launch(CudaStream stream, std::vector<Range> touched, std::function<void()> kernel);

  /// A call of this name, after `skipped` others, fails with this error and does nothing.
  void fail_next(const std::string& call, const std::string& error, int skipped = 0);
  /// How often a call was made.
  std::size_t calls(const std::string& call) const;

  /// Memory that somebody beside this process's slots takes and gives back. Throws OutOfMemory.
  void take_beside(std::uint64_t bytes);
  void give_back_beside(std::uint64_t bytes);
  /// What is in use of the device's memory, with that, and the most that was.
  std::uint64_t physical_bytes() const;
  std::uint64_t peak_physical_bytes() const;
  std::size_t registered_ranges() const;

  CudaProperties properties() override;
  CudaMemoryInfo memory_info() override;
  CudaStream create_stream() override;
  void destroy_stream(CudaStream stream) noexcept override;
  void synchronize(CudaStream stream) override;
  void make_wait(CudaStream stream, CudaEvent event) override;
  CudaEvent create_event() override;
  void destroy_event(CudaEvent event) noexcept override;
  void record(CudaEvent event, CudaStream stream) override;
  bool reached(CudaEvent event) override;
  void synchronize(CudaEvent event) override;
  void copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, CudaStream stream) override;
  void copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, CudaStream stream) override;
  void fill(std::byte* device, std::byte value, std::uint64_t bytes, CudaStream stream) override;
  void register_host(std::span<std::byte> host) override;
  void unregister_host(std::span<std::byte> host) noexcept override;
  std::uint64_t granularity() override;
  CudaMemory create_memory(std::uint64_t bytes) override;
  void release_memory(CudaMemory memory) noexcept override;
  std::byte* reserve_addresses(std::uint64_t bytes) override;
  void free_addresses(std::byte* address, std::uint64_t bytes) noexcept override;
  void map(std::byte* address, std::uint64_t bytes, CudaMemory memory) override;
  void allow_access(std::byte* address, std::uint64_t bytes) override;
  void unmap(std::byte* address, std::uint64_t bytes) override;

 private:
  struct Memory {
    std::uint64_t bytes = 0;
    int mapped = 0;
    bool released = false;
  };
  struct Mapping {
    std::uint64_t bytes = 0;
    CudaMemory memory{};
    bool accessible = false;
  };
  struct Fault {
    std::string error;
    int skipped = 0;
  };

  /// Counts the call, and throws the fault that is due.
  void enter(const std::string& call);
  CUstream_st& stream_of(CudaStream stream);
  void take(std::uint64_t bytes, const std::string& what);
  void give_up_where_unused(CudaMemory memory);
  bool is_accessible(Range range) const;
  void expect_accessible(Range range) const;
  void expect_untouched(Range range);

  const Options options_;
  int file_ = -1;

  mutable std::mutex mutex_;
  std::map<std::string, std::deque<Fault>> faults_;
  std::map<std::string, std::size_t> calls_;
  std::set<CUstream_st*> streams_;
  std::set<CUevent_st*> events_;
  std::uint64_t physical_bytes_ = 0;
  std::uint64_t peak_physical_bytes_ = 0;
  std::uint64_t beside_bytes_ = 0;
  std::uint64_t file_end_ = 0;
  std::map<CudaMemory, Memory> memory_;  ///< by its place in the file
  std::map<std::byte*, std::uint64_t> reserved_;
  std::map<const std::byte*, Mapping> mapped_;
  std::map<std::byte*, std::uint64_t> registered_;
  std::unique_ptr<CUstream_st> default_stream_;
};

/// A CUDA device on a driver of its own, whose granules are pages.
std::unique_ptr<Device> make_cuda_device_in_software(std::uint64_t capacity);

}  // namespace terrace
