/// The tiers of a session: budgets, device, host arena, NVMe store, the access stream over them, and the
/// blocks that the program's own tensors come from.
///
/// Thread-safe once it is made.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/config.h"
#include "integration/program_memory.h"
#include "memory/access_stream.h"
#include "offload/device.h"
#include "offload/host_arena.h"
#include "offload/nvme_store.h"

namespace terrace {

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
  Budget& budget(Tier tier) const noexcept;
  std::uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
  std::uint64_t device_chunk_limit() const noexcept { return device_chunk_limit_; }
  bool has_nvme() const noexcept { return store_ != nullptr; }

  /// Where a tensor of this thread comes from now: the device, or the host under construction.
  const std::shared_ptr<BlockSource>& source() const noexcept;
  const std::shared_ptr<BlockSource>& device_source() const noexcept { return device_source_; }
  const std::shared_ptr<BlockSource>& host_source() const noexcept { return host_source_; }

  /// Between these, tensors made on the calling thread are counted against the host's budget. They nest.
  static void enter_construction() noexcept { ++construction_depth_; }
  static void leave_construction() noexcept { --construction_depth_; }
  static bool is_constructing() noexcept { return construction_depth_ > 0; }

  /// `room`, unless null, is asked before a block is taken from the host. Not while a thread takes one.
  void set_host_room(HostRoom* room) noexcept;

 private:
  class DeviceBlocks;
  class HostBlocks;

  static inline thread_local int construction_depth_ = 0;

  std::uint64_t chunk_bytes_ = 0;
  std::uint64_t device_chunk_limit_ = 0;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Budget> host_budget_;
  std::unique_ptr<Budget> nvme_budget_;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<NvmeStore> store_;
  std::unique_ptr<AccessStream> stream_;
  std::shared_ptr<BlockSource> device_source_;
  std::shared_ptr<BlockSource> host_source_;
};

}  // namespace terrace
