#include "integration/session_memory.h"

#include <array>

#include <ATen/Parallel.h>

#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "integration/cuda_program.h"
#include "integration/rates.h"
#include "offload/choose_device.h"
#include "offload/choose_engine.h"
#include "offload/cuda_device.h"
#include "offload/emulated_device.h"
#include "offload/numa.h"
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
  HostBlocks(std::shared_ptr<Budget> budget, SessionMemory& memory)
      : budget_(std::move(budget)),
        memory_(memory),
        arena_(*memory.arena_),
        stream_(*memory.stream_),
        pages_(budget_->capacity()) {}

  std::byte* take(std::uint64_t bytes, Kind kind) override {
    const std::uint64_t counted = PageBlocks::rounded(bytes);
    reserve(counted, kind);
    bytes_ += counted;
    if (arena_.used_region().size() > memory_for_arena() && !memory_.host_is_pinned_) {
      stream_.let_go_of_arena();
    }
    arena_.trim();  // granules that were used before must not be held beside this
    try {
      return pages_.take(bytes, budget_->capacity());
    } catch (...) {
      bytes_ -= counted;
      budget_->release(kind, counted);
      throw;
    }
  }

  /// What these blocks leave of the host's memory.
  std::uint64_t memory_for_arena() const noexcept {
    return budget_->capacity() - std::min(budget_->capacity(), bytes_.load());
  }

  void give_back(std::byte* block, std::uint64_t bytes, Kind kind) noexcept override {
    pages_.give_back(block, bytes);
    pages_.trim(0);
    bytes_ -= PageBlocks::rounded(bytes);
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
  SessionMemory& memory_;  // these are used only
  HostArena& arena_;
  AccessStream& stream_;  // while the session lives
  PageBlocks pages_;
  std::atomic<std::uint64_t> bytes_{0};  // that are in use
};

namespace {

bool uses_rates(const Config& config) {
  return !config.nvme.paths.empty() && (!config.io.block || config.io.depth == 0 || !config.placement.gradients);
}

}  // namespace

SessionMemory::SessionMemory(const Config& config) {
  const std::uint64_t available = available_memory_bytes();
  make_device(config.device, available);
  // Where the device computes, the program takes one core to tell it what.
  cores_ = share_cores(program_device_.is_cpu() ? at::get_num_threads() : 1, numa_node_);
  plan_ = plan_memory(config, device_->budget().capacity(), device_->slot_bytes(1), available,
                      uses_rates(config) ? RatesFile().load() : Rates{});
  host_budget_ = std::make_shared<Budget>(Tier::host, plan_.host_bytes,
                                          [plan = plan_](std::uint64_t bytes) { return plan.host_memory_for(bytes); });
  arena_ = std::make_unique<HostArena>(plan_.granule_bytes, plan_.granule_count);
  if (numa_node_) {
    prefer_numa_node(arena_->region(), *numa_node_);
  }
  if (!config.nvme.paths.empty()) {
    engine_ = make_io_engine(config.io.engine, cores_.transfers.processors);
    store_ = std::make_unique<NvmeStore>(config.nvme.paths, plan_.nvme_capacity, plan_.granule_bytes);
    for (const auto& file : store_->removed_files()) {
      log(LogLevel::info, "nvme: removed " + file.string() + ", left by a process that is gone");
    }
  }
  nvme_budget_ = std::make_unique<Budget>(Tier::nvme, plan_.nvme_bytes,
                                          [plan = plan_](std::uint64_t bytes) { return plan.nvme_memory_for(bytes); });
  const std::array<Budget*, tier_count> budgets{&device_->budget(), host_budget_.get(), nvme_budget_.get()};
  timeline_room_ = Reservation(*host_budget_, Kind::other, plan_.timeline_bytes);
  timeline_ = std::make_unique<Timeline>(plan_.timeline_bytes, budgets);
  stream_ = std::make_unique<AccessStream>(
      budgets, *device_, *arena_, store_.get(), engine_.get(),
      AccessStream::Options{.device_chunk_limit = plan_.device_chunk_limit,
                            .prefetch_depth = static_cast<std::size_t>(config.io.prefetch),
                            .nvme_depth = plan_.nvme_depth,
                            .staging_blocks_each_way = plan_.staging_blocks_each_way,
                            .transfer_processors = cores_.transfers.processors,
                            .timeline = timeline_.get()});
  device_source_ = std::make_shared<DeviceBlocks>(device_, *stream_);
  host_source_ = std::make_shared<HostBlocks>(host_budget_, *this);
}

SessionMemory::~SessionMemory() {
  detach();
  stream_.reset();  // nothing is copied any more, and no chunk is on the device
  if (host_is_pinned_) {
    device_->unpin(arena_->region());
  }
  if (cuda_device_ != nullptr) {
    give_back_device_memory();
  }
}

void SessionMemory::give_back_device_memory() noexcept {
  try {
    cuda_device_->give_back_free_memory();  // buffers of modules keep the device itself
  } catch (const Error& error) {
    log(LogLevel::error, error.message() + ", as a session's memory was given back");
  }
}

void SessionMemory::make_device(const Config::Device& config, std::uint64_t available_bytes) {
  const DeviceChoice choice = choose_device(config, load_cuda_program);
  if (choice.driver == nullptr) {
    device_ = std::make_shared<EmulatedDevice>(emulated_device_bytes(config, available_bytes), emulated_link(config));
    return;
  }
  program_device_ = c10::Device(c10::DeviceType::CUDA, 0);
  numa_node_ = numa_node_of_pci(choice.driver->properties().pci_address);
  cuda_pool().give_back_kept();  // what the program does not use is the session's to divide
  cuda_device_ = std::make_shared<CudaDevice>(
      choice.driver, config.memory ? *config.memory : automatic_capacity(choice.driver->memory_info()));
  device_ = cuda_device_;
  computes_here();
}

void SessionMemory::attach(ProgramMemory& memory) {
  if (cuda_device_ != nullptr) {
    pool_ = std::make_unique<PoolBudget>(*stream_, cuda_pool(), [this] { cuda_device_->make_room_outside(); });
    attach_cuda_pool(*pool_, memory);
  }
}

void SessionMemory::detach() noexcept {
  if (pool_ != nullptr) {
    detach_cuda_pool();
    pool_.reset();
  }
}

void SessionMemory::computes_on_cuda_device() const { cuda_device_->computes_on(current_cuda_stream()); }

void SessionMemory::make_room_outside(std::uint64_t bytes) {
  stream_->allocate(bytes, Kind::other);
  if (cuda_device_ != nullptr) {
    cuda_device_->make_room_outside();
  }
}

void SessionMemory::pin_host() {
  if (!device_->is_host_memory() && !host_is_pinned_) {
    arena_->keep_all();
    device_->pin(arena_->region());
    host_is_pinned_ = true;
  }
}

void SessionMemory::hold_host() {
  // What is held stays; it has to find room beside tensors that were constructed.
  stream_->hold_arena(static_cast<HostBlocks&>(*host_source_).memory_for_arena());
}

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
  if (is_constructing()) {
    return host_source_;
  }
  return program_device_.is_cpu() ? device_source_ : no_source_;
}

}  // namespace terrace
