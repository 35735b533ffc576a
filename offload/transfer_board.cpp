#include "offload/transfer_board.h"

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace terrace {
namespace {

/// Throws where `prepare` did not tell where every block of its transfer is.
void check_places(const TransferJob& job) {
  const TransferRequest& request = job.request;
  const auto touches = [&](Tier tier) { return request.to == tier || (!request.fill && request.from == tier); };
  if ((touches(Tier::device) && job.places.device == nullptr) ||
      (touches(Tier::host) && job.places.host.size() < job.blocks) ||
      (touches(Tier::nvme) && job.places.nvme.size() < job.blocks)) {
    throw LogicError("transfer: prepare gave no place to some of the " + std::to_string(job.blocks) +
                     " blocks that move from " + std::string(name_of(request.from)) + " to " +
                     std::string(name_of(request.to)));
  }
}

}  // namespace

TransferBoard::TransferBoard(HostArena& arena, std::size_t staging_blocks_each_way, TransferObserver* observer)
    : arena_(arena),
      block_bytes_(arena.granule_bytes()),
      observer_(observer),
      staging_in_(arena, staging_blocks_each_way),
      staging_out_(arena, staging_blocks_each_way) {}

TransferBoard::~TransferBoard() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  // All of them before any of them goes: the last thing that one does may be to wake another.
  for (const auto& worker : workers_) {
    if (worker) {
      worker->wake();
      worker->join();
    }
  }
}

void TransferBoard::register_memory(std::vector<std::span<std::byte>> parts) {
  {
    const Lock lock(mutex_);
    registered_parts_ = std::move(parts);
    ++registration_number_;
  }
  for (const Link link : {Link::nvme_to_host, Link::host_to_nvme}) {
    if (workers_[index_of(link)]) {
      wake(link);
    }
  }
}

void TransferBoard::register_nothing() {
  register_memory({});
  Lock lock(mutex_);
  has_registered_.wait(lock, [&] {
    return std::ranges::all_of(std::array{Link::nvme_to_host, Link::host_to_nvme}, [&](Link link) {
      return !workers_[index_of(link)] || registered_numbers_[index_of(link)] >= registration_number_;
    });
  });
}

std::vector<std::span<std::byte>> TransferBoard::staging_memory(Link link) {
  std::vector<std::span<std::byte>> memory;
  for (std::byte* block : staging_of(link).blocks()) {
    memory.emplace_back(block, block_bytes_);
  }
  return memory;
}

TransferBoard::Registration TransferBoard::registration(Link link, const Lock&) {
  if (registered_parts_.empty()) {
    return {.memory = staging_memory(link), .number = registration_number_};
  }
  return {.memory = registered_parts_, .number = registration_number_};  // which the staging blocks are in, too
}

void TransferBoard::registered(Link link, std::uint64_t number) {
  const Lock lock(mutex_);
  registered_numbers_[index_of(link)] = number;
  has_registered_.notify_all();
}

TransferId TransferBoard::start(TransferRequest request) {
  auto job = std::make_shared<TransferJob>();
  job->request = std::move(request);
  job->route = route_of(job->request);
  // What begins as anything is there as soon as its room is: nothing is done for each block.
  job->block_bytes =
      job->request.fill && !job->request.zeroes ? std::max<std::size_t>(job->request.bytes, 1) : block_bytes_;
  const Route& route = job->route;
  const auto has_worker = [&](Link link) { return workers_[index_of(link)] != nullptr; };
  job->blocks = static_cast<std::size_t>((job->request.bytes + job->block_bytes - 1) / job->block_bytes);
  job->blocks_left = job->blocks;
  if (job->blocks == 0 || (job->request.fill ? job->request.to == Tier::nvme : job->request.from == job->request.to) ||
      !has_worker(route.first) || (route.second && !has_worker(*route.second))) {
    throw LogicError("transfer: nothing can move from " + std::string(name_of(job->request.from)) + " to " +
                     std::string(name_of(job->request.to)) + ", " + std::to_string(job->request.bytes) + " B");
  }
  {
    const Lock lock(mutex_);
    if (jobs_.size() == most_transfers) {
      throw LogicError("transfer: " + std::to_string(most_transfers) + " are under way, and no more may be");
    }
    job->id = static_cast<TransferId>(next_id_++);
    const auto known = jobs_.emplace(static_cast<std::uint64_t>(job->id), job).first;
    try {
      queues_[index_of(route.first)].push(job);
    } catch (...) {
      jobs_.erase(known);  // it would be waited for, and never end
      throw;
    }
  }
  wake(route.first);
  return job->id;
}

void TransferBoard::raise(TransferId id, TransferPriority priority) {
  const Lock lock(mutex_);
  const auto found = jobs_.find(static_cast<std::uint64_t>(id));
  if (found == jobs_.end() || found->second->ended_ns != 0 || found->second->request.priority <= priority) {
    return;
  }
  const std::shared_ptr<TransferJob>& job = found->second;
  const TransferPriority before = std::exchange(job->request.priority, priority);
  queues_[index_of(job->route.first)].raise(job, before);
  if (job->route.second) {
    queues_[index_of(*job->route.second)].raise(job, before);
  }
}

bool TransferBoard::cancel(TransferId id) {
  std::shared_ptr<TransferJob> job;
  {
    const Lock lock(mutex_);
    const auto found = jobs_.find(static_cast<std::uint64_t>(id));
    if (found == jobs_.end() || found->second->started_ns != 0 || found->second->error) {
      return false;
    }
    job = found->second;
    job->error = std::make_exception_ptr(Cancelled("transfer: cancelled before it started"));
    queues_[index_of(job->route.first)].put_first(job);
  }
  wake(job->route.first);
  return true;
}

void TransferBoard::tick() noexcept {
  for (const auto& worker : workers_) {
    if (worker) {
      worker->tick();
    }
  }
}

void TransferBoard::wait_until_idle() {
  Lock lock(mutex_);
  all_ended_.wait(lock, [&] { return jobs_.empty(); });
}

TransferBoard::Moved TransferBoard::moved(std::int64_t* at_ns) const {
  const Lock lock(mutex_);
  if (at_ns != nullptr) {
    *at_ns = monotonic_ns();
  }
  return moved_;
}

bool TransferBoard::begin(const TransferBlock& block) {
  TransferJob& job = *block.job;
  {
    const Lock lock(mutex_);
    if (job.error) {
      return false;
    }
    if (job.prepared) {
      return true;
    }
    job.started_ns = monotonic_ns();
  }
  // Blocks begin on the thread of their first link, one after the other: the first of them readies the job. Those
  // that are on the second link already have been through here.
  job.places = job.request.prepare();
  check_places(job);
  const Lock lock(mutex_);
  job.prepared = true;
  return true;
}

void TransferBoard::pass_on(std::span<TransferBlock> blocks) {
  const Link link = blocks.front().job->route.second.value();
  std::exception_ptr error;
  std::size_t passed = 0;
  {
    const Lock lock(mutex_);
    try {
      for (; passed < blocks.size(); ++passed) {
        queues_[index_of(link)].push(std::move(blocks[passed]));
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  wake(link);
  for (TransferBlock& block : blocks.subspan(passed)) {
    end(std::move(block), error);
  }
}

void TransferBoard::end(std::span<EndOfBlock> ends) {
  std::array<bool, link_count> has_staging{};
  {
    const Lock lock(mutex_);
    for (auto& [block, error] : ends) {
      TransferJob& job = *block.job;
      if (block.staging != nullptr) {
        staging_of(job.route.first).give_back(block.staging);
        has_staging[index_of(job.route.first)] = true;
      }
      if (error && !job.error) {
        job.error = std::move(error);
      }
      if (--job.blocks_left > 0) {
        block.job.reset();  // those of which it is the last keep theirs
      } else {
        note_end(job);
      }
    }
  }
  for (std::size_t link = 0; link < link_count; ++link) {
    if (has_staging[link]) {
      workers_[link]->wake();
    }
  }
  for (const EndOfBlock& end : ends) {
    if (end.block.job) {
      finish(*end.block.job);
    }
  }
}

void TransferBoard::end(TransferBlock block, std::exception_ptr error) {
  EndOfBlock end{std::move(block), std::move(error)};
  this->end({&end, 1});
}

void TransferBoard::lose(Link link, const std::exception_ptr& error) {
  {
    const Lock lock(mutex_);
    staging_of(link).fail(error);
  }
  if (link == Link::host_to_nvme) {
    wake(Link::device_to_host);  // where others wait for staging on the way
  }
}

void TransferBoard::abandon(TransferBlock block, std::exception_ptr error) {
  arena_.keep_mapped();
  {
    const Lock lock(mutex_);
    block.job->error = error;  // more than an error before it, which leaves memory that can be used again
    if (block.staging != nullptr) {
      staging_of(block.job->route.first).lose(std::exchange(block.staging, nullptr));
    }
  }
  end(std::move(block), std::move(error));
}

void TransferBoard::note_end(TransferJob& job) {
  const TransferRequest& request = job.request;
  job.ended_ns = monotonic_ns();
  if (!job.error && !request.fill) {
    moved_[index_of(job.route.first)][index_of(request.kind)] += request.bytes;
    if (job.route.second) {
      moved_[index_of(*job.route.second)][index_of(request.kind)] += request.bytes;
    }
  }
}

void TransferBoard::finish(const TransferJob& job) {
  const TransferRequest& request = job.request;
  if (observer_ != nullptr) {
    observer_->on_transfer({.from = request.from,
                            .to = request.to,
                            .fill = request.fill,
                            .kind = request.kind,
                            .index = request.index,
                            .bytes = request.bytes,
                            .priority = request.priority,
                            .failed = job.error != nullptr,
                            .queued_ns = job.queued_ns,
                            .started_ns = job.started_ns,
                            .ended_ns = job.ended_ns});
  }
  request.done(job.error);
  const Lock lock(mutex_);
  jobs_.erase(static_cast<std::uint64_t>(job.id));
  if (jobs_.empty()) {
    all_ended_.notify_all();
  }
}

}  // namespace terrace
