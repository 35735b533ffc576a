#include "offload/transfer_service.h"

#include <utility>

#include "offload/copy_worker.h"
#include "offload/nvme_worker.h"
#include "offload/start_thread.h"

namespace terrace {

TransferService::TransferService(Device& device, HostArena& arena, NvmeStore* store, IoEngine* engine,
                                 const Options& options)
    : arena_(arena), has_nvme_(store != nullptr), board_(arena, options.staging_blocks_each_way, options.observer) {
  const std::size_t depth =
      options.nvme_depth > 0 ? options.nvme_depth : NvmeWorker::default_depth(board_.block_bytes());
  if (store != nullptr) {
    // Before the workers have the kernel fix what is staged. From small pages a drive takes half as much a second,
    // where each piece of memory is work for it: a virtual one was seen to.
    arena.ask_for_huge_pages();
    for (const Link link : {Link::nvme_to_host, Link::host_to_nvme}) {
      board_.set_worker(link, std::make_unique<NvmeWorker>(board_, *store, *engine, link, depth, options.processors));
    }
  }
  for (const Link link : {Link::host_to_device, Link::device_to_host}) {
    board_.set_worker(link, std::make_unique<CopyWorker>(board_, device, link, options.processors));
  }
  if (store != nullptr) {
    const auto tick = std::chrono::nanoseconds(options.patience) / NvmeWorker::most_ticks;
    clock_ = start_thread<std::jthread>("transfer: starting the thread that watches the drives", options.processors,
                                        [this, tick](const std::stop_token& stop) { keep_time(stop, tick); });
  }
}

/// Tells the workers that time passes. It stands still with the process, so that one that was stopped for a while takes
/// no operation for lost.
void TransferService::keep_time(const std::stop_token& stop, std::chrono::nanoseconds tick) {
  std::unique_lock lock(clock_mutex_);
  while (!clock_stops_.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) {
    board_.tick();
  }
}

void TransferService::hold_arena(std::uint64_t most_bytes) {
  const std::lock_guard lock(hold_mutex_);
  const std::span<std::byte> used = arena_.used_region();
  if (!has_nvme_ || used.size() > most_bytes || used.size() <= held_bytes_ + held_bytes_ / 8) {
    return;
  }
  arena_.keep_all();
  board_.register_memory(arena_.used_parts());
  held_bytes_ = used.size();
}

void TransferService::let_go_of_arena() {
  const std::lock_guard lock(hold_mutex_);
  if (held_bytes_ == 0) {
    return;
  }
  board_.register_nothing();
  arena_.may_trim();
  held_bytes_ = 0;
}

TransferService::~TransferService() { board_.wait_until_idle(); }

}  // namespace terrace
