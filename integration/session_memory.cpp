#include "integration/session_memory.h"

#include <array>

#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "integration/memory_plan.h"
#include "offload/choose_engine.h"
#include "offload/emulated_device.h"
#include "offload/page_blocks.h"

namespace terrace {

/// Tensors on the device. Once the session is gone, blocks that are still used keep the device's memory.
class SessionMemory::DeviceBlocks final : public BlockSource {
 public:
  DeviceBlocks(std::shared_ptr<Device> device, AccessStream& stream) : device_(std::move(device)), stream_(&stream) {}

  std::byte* take(std::uint64_t bytes, Kind kind) override {
    const std::uint64_t counted = device_->allocation_bytes(bytes);
    stream_->allocate(counted, kind);
    try {
      return device_->allocate(bytes);
    } catch (...) {
      device_->budget().release(kind, counted);
      throw;
    }
  }

  void give_back(std::byte* block, std::uint64_t bytes, Kind kind) noexcept override {
    device_->deallocate(block, bytes);
    device_->budget().release(kind, device_->allocation_bytes(bytes));
  }

 private:
  const std::shared_ptr<Device> device_;
  AccessStream* const stream_;  // only used while the session lives
};

/// Tensors of a model under construction.
class SessionMemory::HostBlocks final : public BlockSource {
 public:
  HostBlocks(std::shared_ptr<Budget> budget, HostArena& arena, AccessStream& stream)
      : budget_(std::move(budget)), arena_(arena), stream_(stream), pages_(budget_->capacity()) {}

  std::byte* take(std::uint64_t bytes, Kind kind) override {
    const std::uint64_t counted = PageBlocks::rounded(bytes);
    reserve(counted, kind);
    arena_.trim();  // granules that were used before must not be held beside this
    try {
      return pages_.take(bytes, budget_->capacity());
    } catch (...) {
      budget_->release(kind, counted);
      throw;
    }
  }

  void give_back(std::byte* block, std::uint64_t bytes, Kind kind) noexcept override {
    pages_.give_back(block, bytes);
    pages_.trim(0);
    budget_->release(kind, PageBlocks::rounded(bytes));
  }

  HostRoom* room = nullptr;

 private:
  void reserve(std::uint64_t bytes, Kind kind) {
    if (room == nullptr) {
      try {
        stream_.allocate(bytes, kind, Tier::host);
      } catch (const OutOfMemory& error) {
        throw OutOfMemory(error.message(), (error.hint().empty() ? "" : error.hint() + ", or ") +
                                               "give nvme.paths, where what does not fit can go");
      }
      return;
    }
    room->before_block(bytes);
    try {
      stream_.allocate(bytes, kind, Tier::host);
    } catch (...) {
      room->after_block(bytes);
      throw;
    }
    room->after_block(bytes);
  }

  const std::shared_ptr<Budget> budget_;
  HostArena& arena_;      // these two are used only
  AccessStream& stream_;  // while the session lives
  PageBlocks pages_;
};

SessionMemory::SessionMemory(const Config& config) {
  const std::uint64_t available = available_memory_bytes();
  device_ =
      std::make_shared<EmulatedDevice>(emulated_device_bytes(config.device, available), emulated_link(config.device));
  const MemoryPlan plan = plan_memory(config, device_->budget().capacity(), available);
  chunk_bytes_ = plan.chunk_bytes;
  device_chunk_limit_ = plan.device_chunk_limit;
  host_budget_ = std::make_shared<Budget>(Tier::host, plan.host_bytes);
  arena_ = std::make_unique<HostArena>(plan.granule_bytes, plan.granule_count);
  if (!config.nvme.paths.empty()) {
    engine_ = make_io_engine(config.io.engine);
    store_ = std::make_unique<NvmeStore>(config.nvme.paths, plan.nvme_capacity, plan.granule_bytes);
    for (const auto& file : store_->removed_files()) {
      log(LogLevel::info, "nvme: removed " + file.string() + ", left by a process that is gone");
    }
  }
  nvme_budget_ = std::make_unique<Budget>(Tier::nvme, plan.nvme_bytes);
  stream_ = std::make_unique<AccessStream>(
      std::array<Budget*, tier_count>{&device_->budget(), host_budget_.get(), nvme_budget_.get()}, *device_, *arena_,
      store_.get(), engine_.get(),
      AccessStream::Options{.device_chunk_limit = device_chunk_limit_,
                            .prefetch_depth = static_cast<std::size_t>(config.io.prefetch)});
  device_source_ = std::make_shared<DeviceBlocks>(device_, *stream_);
  host_source_ = std::make_shared<HostBlocks>(host_budget_, *arena_, *stream_);
}

SessionMemory::~SessionMemory() = default;

void SessionMemory::set_host_room(HostRoom* room) noexcept { static_cast<HostBlocks&>(*host_source_).room = room; }

Budget& SessionMemory::budget(Tier tier) const noexcept {
  switch (tier) {
    case Tier::device:
      return device_->budget();
    case Tier::host:
      return *host_budget_;
    case Tier::nvme:
      break;
  }
  return *nvme_budget_;
}

const std::shared_ptr<BlockSource>& SessionMemory::source() const noexcept {
  return is_constructing() ? host_source_ : device_source_;
}

}  // namespace terrace
