/// The tiers of a session: budgets, device, host arena, NVMe store, the access stream over them, and the
/// blocks that the program's own tensors come from.
///
/// Thread-safe once it is made.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

#include "base/config.h"
#include "integration/memory_plan.h"
#include "integration/program_memory.h"
#include "memory/access_stream.h"
#include "memory/pool_budget.h"
#include "memory/timeline.h"
#include "offload/core_shares.h"
#include "offload/device.h"
#include "offload/host_arena.h"
#include "offload/nvme_store.h"

namespace terrace {

class CudaDevice;

/// Who can make room on the host for a tensor under construction.
class HostRoom {
 public:
  virtual ~HostRoom() = default;
  /// Before a block of so many bytes is taken from the budget, and after it was or could not be. May throw.
  virtual void before_block(std::uint64_t bytes) = 0;
  virtual void after_block(std::uint64_t bytes) noexcept = 0;
};

class SessionMemory {
 public:
  /// Throws ConfigError, OutOfMemory (a budget that holds not even the staging) or IoError (a path that cannot
  /// be written, or nvme.memory above the free space).
  explicit SessionMemory(const Config& config);
  ~SessionMemory();
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  AccessStream& stream() const noexcept { return *stream_; }
  Device& device() const noexcept { return *device_; }
  /// Where the program computes: the CPU, or a CUDA device.
  c10::Device program_device() const noexcept { return program_device_; }
  /// As they are for as many threads as LibTorch had when this was made.
  const CoreShares& cores() const noexcept { return cores_; }
  Budget& budget(Tier tier) const noexcept;
  const MemoryPlan& plan() const noexcept { return plan_; }
  Timeline& timeline() const noexcept { return *timeline_; }
  bool has_nvme() const noexcept { return store_ != nullptr; }

  /// Where a tensor on the CPU of this thread comes from now: the host under construction, otherwise the device where
  /// the CPU computes, and else null.
  const std::shared_ptr<BlockSource>& source() const noexcept;
  const std::shared_ptr<BlockSource>& device_source() const noexcept { return device_source_; }
  const std::shared_ptr<BlockSource>& host_source() const noexcept { return host_source_; }

  /// Between these, tensors made on the calling thread are counted against the host's budget. They nest.
  static void enter_construction() noexcept { ++construction_depth_; }
  static void leave_construction() noexcept { --construction_depth_; }
  static bool is_constructing() noexcept { return construction_depth_ > 0; }

  /// From now on, until `detach`, the program's tensors on a device that is not the CPU are counted; `memory` hears of
  /// refusals.
  void attach(ProgramMemory& memory);
  void detach() noexcept;
  /// This thread issues computation on the device, before and after what it issues next.
  void computes_here() const {
    if (cuda_device_ != nullptr) computes_on_cuda_device();
  }
  /// Has chunks leave the device for bytes of the program's that are not counted otherwise; they are given back by
  /// `stream().free(bytes, Kind::other)`. Throws OutOfMemory.
  void make_room_outside(std::uint64_t bytes);
  /// Fixes the host's memory for chunks in place, where the device's copies want that. Before, it is taken from the
  /// system as it is used, and a model under construction has the rest of the budget.
  void pin_host();

  /// At a step's end, when chunks have taken their places: transfers to and from NVMe are cheaper afterwards.
  void hold_host();

  /// `room`, unless null, is asked before a block is taken from the host. Not while a thread takes one.
  void set_host_room(HostRoom* room) noexcept;

 private:
  void computes_on_cuda_device() const;
  void make_device(const Config::Device& config, std::uint64_t available_bytes);
  void give_back_device_memory() noexcept;

  class DeviceBlocks;
  class HostBlocks;

  static inline thread_local int construction_depth_ = 0;

  MemoryPlan plan_;
  c10::Device program_device_ = c10::DeviceType::CPU;
  std::optional<unsigned> numa_node_;  ///< that the device is near to
  CoreShares cores_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<CudaDevice> cuda_device_;  ///< the same, where it is one
  std::shared_ptr<Budget> host_budget_;
  std::unique_ptr<Budget> nvme_budget_;
  Reservation timeline_room_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<NvmeStore> store_;
  std::unique_ptr<AccessStream> stream_;
  std::shared_ptr<BlockSource> device_source_;
  std::shared_ptr<BlockSource> host_source_;
  const std::shared_ptr<BlockSource> no_source_;
  std::unique_ptr<PoolBudget> pool_;
  std::atomic<bool> host_is_pinned_{false};
};

}  // namespace terrace
