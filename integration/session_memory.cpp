#include "integration/session_memory.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "offload/choose_engine.h"
#include "offload/copy_rate.h"
#include "offload/emulated_device.h"
#include "offload/page_blocks.h"

namespace terrace {
namespace {

/// A chunk is small beside the room that chunks move in, and large enough to move at full rate.
std::uint64_t default_chunk_bytes(std::uint64_t device_chunk_limit, std::uint64_t host_bytes) {
  constexpr std::uint64_t smallest = 256 * 1024;
  constexpr std::uint64_t largest = 32 * 1024 * 1024;
  return std::clamp(std::bit_floor(std::min(device_chunk_limit / 16, host_bytes / 32) | 1), smallest, largest);
}

/// The rate of an emulated link, 0 for none. It has to be one that copies on this machine can keep up with: throws
/// ConfigError where they cannot, warns where they come near.
std::uint64_t checked_link(const std::optional<std::uint64_t>& rate) {
  if (!rate) {
    return 0;
  }
  const double copied = measured_copy_rate();
  const auto wanted = static_cast<double>(*rate);
  const std::string figures = "device.link is " + format_bytes(*rate) + "/s, and this machine copies " +
                              format_bytes(static_cast<std::uint64_t>(copied)) + "/s";
  if (wanted > copied) {
    throw ConfigError(figures + ": a link of that rate cannot be emulated", "lower it, or set it to \"unlimited\"");
  }
  if (wanted > 0.4 * copied) {
    log_once("device.link", LogLevel::warning, figures + ": copies take cores that the program needs");
  }
  return *rate;
}

/// Extents are kept track of in memory; where the store's size is not given it stays below this many.
constexpr std::uint64_t most_default_extents = 256 * 1024;

}  // namespace

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
  const std::uint64_t device_bytes = config.device.memory.value_or(available / 2);
  const std::uint64_t host_bytes = config.host.memory.value_or(available / 4);
  device_chunk_limit_ = std::min(config.device.chunks.value_or(device_bytes), device_bytes);
  chunk_bytes_ = config.placement.chunk.value_or(default_chunk_bytes(device_chunk_limit_, host_bytes));
  constexpr std::uint64_t chunk_unit = 4096 * sizeof(float);
  chunk_bytes_ = std::max<std::uint64_t>((chunk_bytes_ + chunk_unit - 1) / chunk_unit, 1) * chunk_unit;
  const std::size_t granule_bytes = HostArena::choose_granule(chunk_bytes_);

  device_ = std::make_shared<EmulatedDevice>(
      device_bytes,
      LinkSpeed{.bytes_per_second = checked_link(config.device.link), .latency_ns = config.device.latency_us * 1000});
  host_budget_ = std::make_shared<Budget>(Tier::host, host_bytes);
  const std::uint64_t granules = host_bytes / granule_bytes;
  if (granules < TransferService::staging_blocks) {
    throw OutOfMemory("host: host.memory (" + format_bytes(host_bytes) + ") does not hold the " +
                          std::to_string(TransferService::staging_blocks) + " staging blocks of " +
                          format_bytes(granule_bytes),
                      "raise host.memory to at least " +
                          format_bytes_exactly(TransferService::staging_blocks * granule_bytes + 5 * chunk_bytes_) +
                          " or lower placement.chunk");
  }
  arena_ = std::make_unique<HostArena>(granule_bytes, static_cast<std::size_t>(granules));
  std::uint64_t nvme_bytes = 0;
  if (!config.nvme.paths.empty()) {
    const std::uint64_t capacity = config.nvme.memory.value_or(
        std::min(NvmeStore::default_capacity(config.nvme.paths), most_default_extents * granule_bytes));
    engine_ = make_io_engine(config.io.engine);
    store_ = std::make_unique<NvmeStore>(config.nvme.paths, capacity, granule_bytes);
    nvme_bytes = store_->extent_count() * granule_bytes;
    for (const auto& file : store_->removed_files()) {
      log(LogLevel::info, "nvme: removed " + file.string() + ", left by a process that is gone");
    }
  }
  nvme_budget_ = std::make_unique<Budget>(Tier::nvme, nvme_bytes);
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
