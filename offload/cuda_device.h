/// The memory of a CUDA device, and copies in and out of it on two streams of its own.
///
/// Slots come from cuda_slots.h, which says what is counted where. Computation is the program's: it says on which
/// streams it computes. A slot may be given back while kernels that were issued before still use it: what is copied or
/// zeroed into the next slot there comes after them, or after those of which the giver says that they were the last.
///
/// `allocate` is for what Terrace itself keeps on the device; each allocation is a slot of its own, of whole granules.
/// The program's tensors come from LibTorch's pool. It reserves what it grows by in the budget and calls
/// `make_room_outside` before it grows.
///
/// An error of the driver is thrown by the call that meets it; where that one cannot throw, all that come after it do.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "offload/cuda_driver.h"
#include "offload/cuda_fences.h"
#include "offload/cuda_slots.h"
#include "offload/device.h"

namespace terrace {

/// What device.memory = "auto" is: the memory that is free now, when CUDA's own context has taken its part, less a
/// margin for what kernels and libraries load later. Zero where not even the margin is free.
std::uint64_t automatic_capacity(const CudaMemoryInfo& memory) noexcept;

class CudaDevice final : public Device {
 public:
  /// Throws what the driver does. At the end its slots have been given back.
  CudaDevice(std::shared_ptr<CudaDriver> driver, std::uint64_t capacity_bytes);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  std::string_view name() const noexcept override { return "cuda"; }
  Budget& budget() noexcept override { return budget_; }
  bool is_host_memory() const noexcept override { return false; }
  bool guards_slots() const noexcept override { return true; }
  void pin(std::span<std::byte> host) override;
  void unpin(std::span<std::byte> host) noexcept override;
  std::uint64_t slot_bytes(std::uint64_t bytes) const noexcept override { return slots_.rounded(bytes); }
  std::uint64_t allocation_bytes(std::uint64_t bytes) const noexcept override { return slots_.rounded(bytes); }
  std::byte* map_slot(std::uint64_t bytes) override;
  void unmap_slot(std::byte* slot, std::uint64_t bytes, std::optional<Fence> last_use = {}) noexcept override;
  std::byte* allocate(std::uint64_t bytes) override;
  void deallocate(std::byte* memory, std::uint64_t bytes) noexcept override { unmap_slot(memory, bytes); }
  Fence copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, Fence after) override;
  Fence copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, Fence after) override;
  Fence fill_zero(std::byte* device, std::uint64_t bytes, Fence after) override;
  /// A CUDA stream, which lives for as long as the device; null is the default one.
  void computes_on(void* stream) override;
  Fence computation() override;
  bool reached(Fence fence) noexcept override { return fences_.reached(fence); }
  std::optional<std::int64_t> reached_ns(Fence fence) noexcept override;
  void wait(Fence fence) override { fences_.wait(fence); }

  /// After memory beside slots was reserved in the budget and before it is taken: gives back what would be too much.
  /// May wait for computation.
  void make_room_outside() { slots_.keep_within_budget(); }
  /// Gives all memory back that is kept for reuse; returns how many bytes. May wait for computation.
  std::uint64_t give_back_free_memory() { return slots_.keep_nothing(); }
  /// What slots have of the device's memory, in use or kept for reuse.
  std::uint64_t physical_bytes() const { return slots_.physical_bytes(); }

  CudaDriver& driver() noexcept { return *driver_; }

 private:
  struct OwnStream {
    explicit OwnStream(CudaDriver& its_driver) : driver(its_driver), stream(driver.create_stream()) {}
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;
    ~OwnStream() { driver.destroy_stream(stream); }

    CudaDriver& driver;
    const CudaStream stream;
  };

  /// Throws where a call that could not throw has failed.
  void check() const;
  template <class Issue>
  Fence issue(CudaStream stream, Fence after, Issue&& copy);

  const std::shared_ptr<CudaDriver> driver_;
  Budget budget_;
  CudaFences fences_;
  CudaSlots slots_;
  OwnStream in_;
  OwnStream out_;

  mutable std::mutex mutex_;  ///< of what follows
  std::exception_ptr failure_;
  std::set<std::byte*> pinned_;

  std::shared_mutex streams_mutex_;
  std::vector<CudaStream> compute_;
};

}  // namespace terrace
