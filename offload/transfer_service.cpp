#include "offload/transfer_service.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace terrace {
namespace {

/// Bytes that may be on a link at once: enough that it never idles, few enough that a demand is soon served.
constexpr std::size_t copied_bytes_in_flight = std::size_t{2} << 20U;
/// Bytes that may be with a drive at once, each way, and operations.
constexpr std::size_t nvme_bytes_in_flight = std::size_t{8} << 20U;
constexpr std::size_t most_nvme_operations = 64;
/// So many blocks may be on any link.
constexpr std::size_t fewest_in_flight = 2;
constexpr std::size_t fewest_nvme_operations = 8;

std::size_t copies_in_flight(std::size_t block_bytes) {
  return std::max(copied_bytes_in_flight / block_bytes, fewest_in_flight);
}
std::size_t nvme_depth(std::size_t block_bytes) {
  return std::clamp(nvme_bytes_in_flight / block_bytes, fewest_nvme_operations, most_nvme_operations);
}

/// The link that a transfer crosses first, and the one it crosses then.
struct Route {
  Link first;
  std::optional<Link> second;
};

Route route_of(const TransferRequest& request) {
  if (request.fill) {
    return {Link::host_to_device, std::nullopt};  // crosses none; that thread is used to touching memory
  }
  if (request.from == Tier::nvme) {
    return {Link::nvme_to_host, request.to == Tier::device ? std::optional(Link::host_to_device) : std::nullopt};
  }
  if (request.from == Tier::device) {
    return {Link::device_to_host, request.to == Tier::nvme ? std::optional(Link::host_to_nvme) : std::nullopt};
  }
  return {request.to == Tier::device ? Link::host_to_device : Link::host_to_nvme, std::nullopt};
}

}  // namespace

/// A transfer under way. What is not constant is guarded by the service's mutex, but for `places`, which the first
/// block's thread sets before any block moves.
struct TransferService::Job {
  TransferId id{};
  TransferRequest request;
  Route route{};
  std::size_t block_bytes = 0;
  std::int64_t queued_ns = monotonic_ns();
  std::int64_t started_ns = 0;
  TransferPlaces places;
  bool prepared = false;
  std::size_t blocks_left = 0;
  std::exception_ptr error;

  std::size_t bytes_of(std::size_t block) const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(block_bytes, request.bytes - block * block_bytes));
  }
  std::byte* on_device(std::size_t block) const { return places.device + block * block_bytes; }
};

struct TransferService::Block {
  std::shared_ptr<Job> job;
  std::size_t index = 0;
  std::byte* staging = nullptr;  ///< held from the first link to the end of the second
};

/// The blocks that wait for one link, the most urgent first. Guarded by the service's mutex.
class TransferService::LinkQueue {
 public:
  void push(Block block) {
    // Which wait for a staging block, and can therefore be passed by those that do not.
    const bool needs_staging = block.job->route.second.has_value() && block.staging == nullptr;
    const Key key{block.job->request.priority, block.job->id, block.index};
    (needs_staging ? staged_ : direct_).emplace(key, std::move(block));
  }

  /// The most urgent block that can start. One that needs staging takes it from `staging`.
  std::optional<Block> pop(Staging& staging) {
    if (!staged_.empty() && (direct_.empty() || staged_.begin()->first < direct_.begin()->first)) {
      if (staged_.begin()->second.job->error) {
        return take(staged_);  // it will not move
      }
      if (std::byte* memory = staging.try_take()) {
        Block block = take(staged_);
        block.staging = memory;
        return block;
      }
    }
    if (!direct_.empty()) {
      return take(direct_);
    }
    return std::nullopt;
  }

  void raise(const std::shared_ptr<Job>& job, TransferPriority from) {
    for (Blocks* blocks : {&staged_, &direct_}) {
      auto at = blocks->lower_bound(Key{from, job->id, 0});
      while (at != blocks->end() && at->second.job == job) {
        auto node = blocks->extract(at++);
        std::get<0>(node.key()) = job->request.priority;
        blocks->insert(std::move(node));
      }
    }
  }

 private:
  using Key = std::tuple<TransferPriority, TransferId, std::size_t>;
  using Blocks = std::map<Key, Block>;

  static Block take(Blocks& blocks) {
    Block block = std::move(blocks.begin()->second);
    blocks.erase(blocks.begin());
    return block;
  }

  Blocks staged_;
  Blocks direct_;
};

/// What the threads share. They are joined before any of it goes.
struct TransferService::Shared {
  Shared(Device& the_device, HostArena& arena, NvmeStore* the_store, TransferObserver* the_observer)
      : device(the_device),
        store(the_store),
        observer(the_observer),
        block_bytes(arena.granule_bytes()),
        staging_in(arena, staging_blocks_each_way),
        staging_out(arena, staging_blocks_each_way) {}

  Staging& staging_of(Link first_link) { return first_link == Link::nvme_to_host ? staging_in : staging_out; }

  void push(Link link, Block block);
  /// Readies the job on the first of its blocks; false where the block has nothing to do because its job has failed.
  bool begin(const Block& block);
  /// The block has come to rest, or failed.
  void end(Block block, std::exception_ptr error);
  void finish(Job& job);
  /// Wakes the threads of the links: there may be something to do.
  void wake(Link link);

  Device& device;
  NvmeStore* const store;
  TransferObserver* const observer;
  const std::size_t block_bytes;
  Staging staging_in;   // on the way from NVMe to the device
  Staging staging_out;  // on the way back

  std::mutex mutex;
  std::array<LinkQueue, link_count> queues;
  std::array<std::condition_variable, link_count> work;
  std::unordered_map<std::uint64_t, std::shared_ptr<Job>> jobs;
  std::uint64_t next_id = 1;
  std::condition_variable all_ended;
  bool stopping = false;

  std::array<std::array<std::atomic<std::uint64_t>, kind_count>, link_count> moved{};

  std::array<std::unique_ptr<CopyWorker>, link_count> copiers;
  std::array<std::unique_ptr<NvmeWorker>, link_count> movers;
};

/// The thread of a link between host and device.
class TransferService::CopyWorker {
 public:
  CopyWorker(Shared& shared, Link link) : shared_(shared), link_(link), thread_([this] { work(); }) {}
  ~CopyWorker() { join(); }
  CopyWorker(const CopyWorker&) = delete;
  CopyWorker& operator=(const CopyWorker&) = delete;

  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  struct Copying {
    Block block;
    Fence there;
  };

  void work() {
    std::unique_lock lock(shared_.mutex);
    for (;;) {
      std::optional<Block> next;
      if (copying_.size() < copies_in_flight(shared_.block_bytes)) {
        next = queue().pop(shared_.staging_of(link_));
      }
      if (!next && copying_.empty()) {
        if (shared_.stopping) {
          return;
        }
        shared_.work[index_of(link_)].wait(lock);
        continue;
      }
      lock.unlock();
      if (next) {
        start(std::move(*next));
      }
      // The oldest is waited for only when no other can start.
      if (!copying_.empty() && (!next || shared_.device.reached(copying_.front().there))) {
        finish_first();
      }
      lock.lock();
    }
  }

  void start(Block block) {
    try {
      if (!shared_.begin(block)) {
        shared_.end(std::move(block), nullptr);
        return;
      }
      const Fence there = copy(block);
      copying_.push_back({std::move(block), there});
    } catch (...) {
      shared_.end(std::move(block), std::current_exception());
    }
  }

  Fence copy(const Block& block) {
    const Job& job = *block.job;
    const TransferRequest& request = job.request;
    const std::size_t bytes = job.bytes_of(block.index);
    if (request.fill) {
      if (request.to == Tier::device) {
        return shared_.device.fill_zero(job.on_device(block.index), bytes, request.after);
      }
      std::fill_n(job.places.host.at(block.index), bytes, std::byte{});
      return {};
    }
    std::byte* host = block.staging != nullptr ? block.staging : job.places.host.at(block.index);
    return link_ == Link::host_to_device
               ? shared_.device.copy_in(job.on_device(block.index), host, bytes, request.after)
               : shared_.device.copy_out(host, job.on_device(block.index), bytes, request.after);
  }

  void finish_first() {
    Block block = std::move(copying_.front().block);
    const Fence there = copying_.front().there;
    copying_.pop_front();
    try {
      shared_.device.wait(there);
    } catch (...) {
      shared_.end(std::move(block), std::current_exception());
      return;
    }
    if (link_ == Link::device_to_host && block.job->route.second) {
      shared_.push(Link::host_to_nvme, std::move(block));
    } else {
      shared_.end(std::move(block), nullptr);
    }
  }

  LinkQueue& queue() { return shared_.queues[index_of(link_)]; }

  Shared& shared_;
  const Link link_;
  std::deque<Copying> copying_;  // in the order of their fences
  std::thread thread_;           // last: it uses all of the above
};

/// The thread of a link between host and NVMe.
class TransferService::NvmeWorker {
 public:
  NvmeWorker(Shared& shared, Link link, std::unique_ptr<IoQueue> io)
      : shared_(shared), link_(link), io_(std::move(io)), thread_([this] { work(); }) {}
  ~NvmeWorker() { join(); }
  NvmeWorker(const NvmeWorker&) = delete;
  NvmeWorker& operator=(const NvmeWorker&) = delete;

  void wake() noexcept { io_->wake(); }

  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  void work() {
    std::vector<IoCompletion> completions;
    for (;;) {
      std::optional<Block> next;
      {
        const std::lock_guard lock(shared_.mutex);
        if (moving_.size() < io_->depth()) {
          next = shared_.queues[index_of(link_)].pop(shared_.staging_of(link_));
        }
        if (!next && moving_.empty() && shared_.stopping) {
          return;
        }
      }
      completions.clear();
      if (next) {
        start(std::move(*next));
      }
      try {
        if (next) {
          io_->poll(completions);
        } else {
          io_->wait(completions);
        }
      } catch (...) {
        fail_all(std::current_exception());
      }
      for (IoCompletion& completion : completions) {
        finish(completion);
      }
    }
  }

  void start(Block block) {
    const auto at = moving_.insert(moving_.end(), std::move(block));
    try {
      if (dead_) {
        std::rethrow_exception(dead_);
      }
      if (!shared_.begin(*at)) {
        end(at, nullptr);
        return;
      }
      const Job& job = *at->job;
      const ExtentId extent = job.places.nvme.at(at->index);
      std::byte* memory = memory_of(*at);
      IoOperation operation = link_ == Link::nvme_to_host
                                  ? shared_.store->begin_read(extent, memory, job.bytes_of(at->index))
                                  : shared_.store->begin_write(extent, memory, job.bytes_of(at->index));
      operation.owner = &*at;
      io_->submit(operation);
    } catch (...) {
      end(at, std::current_exception());
    }
  }

  void finish(IoCompletion& completion) {
    const auto at =
        std::find_if(moving_.begin(), moving_.end(), [&](const Block& block) { return &block == completion.owner; });
    if (at == moving_.end()) {
      return;
    }
    const Job& job = *at->job;
    const ExtentId extent = job.places.nvme.at(at->index);
    std::exception_ptr error = completion.error;
    try {
      if (link_ == Link::nvme_to_host) {
        shared_.store->end_read(extent, memory_of(*at), error);
      } else {
        shared_.store->end_write(extent, error == nullptr);
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (error && link_ == Link::host_to_nvme && job.request.write_failed) {
      job.request.write_failed(extent, error);
    }
    if (!error && link_ == Link::nvme_to_host && job.route.second) {
      Block block = std::move(*at);
      moving_.erase(at);
      shared_.push(Link::host_to_device, std::move(block));
      return;
    }
    end(at, error);
  }

  /// The queue is of no use any more: whoever waits for it hears so.
  void fail_all(std::exception_ptr error) {
    dead_ = error;
    while (!moving_.empty()) {
      IoCompletion lost{.owner = &moving_.front(), .error = error};
      finish(lost);
    }
  }

  void end(std::list<Block>::iterator at, std::exception_ptr error) {
    Block block = std::move(*at);
    moving_.erase(at);
    shared_.end(std::move(block), std::move(error));
  }

  static std::byte* memory_of(const Block& block) {
    return block.staging != nullptr ? block.staging : block.job->places.host.at(block.index);
  }

  Shared& shared_;
  const Link link_;
  const std::unique_ptr<IoQueue> io_;
  std::list<Block> moving_;  // with the drive; addresses are the operations' owners
  std::exception_ptr dead_;
  std::thread thread_;  // last: it uses all of the above
};

void TransferService::Shared::wake(Link link) {
  if (movers[index_of(link)]) {
    movers[index_of(link)]->wake();
  } else {
    work[index_of(link)].notify_one();
  }
}

void TransferService::Shared::push(Link link, Block block) {
  {
    const std::lock_guard lock(mutex);
    queues[index_of(link)].push(std::move(block));
  }
  wake(link);
}

bool TransferService::Shared::begin(const Block& block) {
  Job& job = *block.job;
  {
    const std::lock_guard lock(mutex);
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
  const std::lock_guard lock(mutex);
  job.prepared = true;
  return true;
}

void TransferService::Shared::end(Block block, std::exception_ptr error) {
  Job& job = *block.job;
  bool last = false;
  {
    // The staging goes back under the lock, as the thread of the first link looks for one and falls asleep under it.
    const std::lock_guard lock(mutex);
    if (block.staging != nullptr) {
      staging_of(job.route.first).give_back(block.staging);
    }
    if (error && !job.error) {
      job.error = std::move(error);
    }
    last = --job.blocks_left == 0;
  }
  if (block.staging != nullptr) {
    wake(job.route.first);
  }
  if (last) {
    finish(job);
  }
}

void TransferService::Shared::finish(Job& job) {
  const TransferRequest& request = job.request;
  TransferPriority priority;
  {
    const std::lock_guard lock(mutex);
    priority = request.priority;
  }
  if (!job.error && !request.fill) {
    moved[index_of(job.route.first)][index_of(request.kind)].fetch_add(request.bytes, std::memory_order_relaxed);
    if (job.route.second) {
      moved[index_of(*job.route.second)][index_of(request.kind)].fetch_add(request.bytes, std::memory_order_relaxed);
    }
  }
  if (observer != nullptr) {
    observer->on_transfer({.from = request.from,
                           .to = request.to,
                           .fill = request.fill,
                           .kind = request.kind,
                           .bytes = request.bytes,
                           .priority = priority,
                           .queued_ns = job.queued_ns,
                           .started_ns = job.started_ns,
                           .ended_ns = monotonic_ns(),
                           .failed = job.error != nullptr});
  }
  request.done(job.error);
  const std::lock_guard lock(mutex);
  jobs.erase(static_cast<std::uint64_t>(job.id));
  if (jobs.empty()) {
    all_ended.notify_all();
  }
}

TransferService::TransferService(Device& device, HostArena& arena, NvmeStore* store, IoEngine* engine,
                                 TransferObserver* observer)
    : shared_(std::make_unique<Shared>(device, arena, store, observer)) {
  if (store != nullptr) {
    const auto open = [&](Staging& staging) {
      std::vector<std::span<std::byte>> registered;
      for (std::byte* block : staging.blocks()) {
        registered.emplace_back(block, shared_->block_bytes);
      }
      return engine->open_queue(nvme_depth(shared_->block_bytes), registered);
    };
    std::unique_ptr<IoQueue> reads = open(shared_->staging_in);
    std::unique_ptr<IoQueue> writes = open(shared_->staging_out);
    shared_->movers[index_of(Link::nvme_to_host)] =
        std::make_unique<NvmeWorker>(*shared_, Link::nvme_to_host, std::move(reads));
    shared_->movers[index_of(Link::host_to_nvme)] =
        std::make_unique<NvmeWorker>(*shared_, Link::host_to_nvme, std::move(writes));
  }
  for (const Link link : {Link::host_to_device, Link::device_to_host}) {
    shared_->copiers[index_of(link)] = std::make_unique<CopyWorker>(*shared_, link);
  }
}

TransferService::~TransferService() {
  {
    std::unique_lock lock(shared_->mutex);
    shared_->all_ended.wait(lock, [&] { return shared_->jobs.empty(); });
    shared_->stopping = true;
  }
  for (const Link link : all_links) {
    shared_->wake(link);
  }
  // All of them before any of them goes: the last thing that one does may be to wake another.
  for (const Link link : all_links) {
    if (shared_->copiers[index_of(link)]) {
      shared_->copiers[index_of(link)]->join();
    }
    if (shared_->movers[index_of(link)]) {
      shared_->movers[index_of(link)]->join();
    }
  }
}

TransferId TransferService::start(TransferRequest request) {
  auto job = std::make_shared<Job>();
  job->request = std::move(request);
  job->route = route_of(job->request);
  job->block_bytes = shared_->block_bytes;
  const auto blocks = static_cast<std::size_t>((job->request.bytes + job->block_bytes - 1) / job->block_bytes);
  if (blocks == 0 ||
      (shared_->store == nullptr && (job->request.from == Tier::nvme || job->request.to == Tier::nvme)) ||
      (job->request.fill ? job->request.to == Tier::nvme : job->request.from == job->request.to)) {
    throw LogicError("transfer: nothing can move from " + std::string(name_of(job->request.from)) + " to " +
                     std::string(name_of(job->request.to)) + ", " + std::to_string(job->request.bytes) + " B");
  }
  job->blocks_left = blocks;
  {
    const std::lock_guard lock(shared_->mutex);
    job->id = static_cast<TransferId>(shared_->next_id++);
    shared_->jobs.emplace(static_cast<std::uint64_t>(job->id), job);
    for (std::size_t block = 0; block < blocks; ++block) {
      shared_->queues[index_of(job->route.first)].push({.job = job, .index = block});
    }
  }
  shared_->wake(job->route.first);
  return job->id;
}

void TransferService::raise(TransferId id, TransferPriority priority) {
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->jobs.find(static_cast<std::uint64_t>(id));
  if (found == shared_->jobs.end() || found->second->request.priority <= priority) {
    return;
  }
  const TransferPriority before = std::exchange(found->second->request.priority, priority);
  for (const std::optional<Link> link : {std::optional(found->second->route.first), found->second->route.second}) {
    if (link) {
      shared_->queues[index_of(*link)].raise(found->second, before);
    }
  }
}

TransferService::Moved TransferService::moved() const {
  Moved moved{};
  for (std::size_t link = 0; link < link_count; ++link) {
    for (std::size_t kind = 0; kind < kind_count; ++kind) {
      moved[link][kind] = shared_->moved[link][kind].load(std::memory_order_relaxed);
    }
  }
  return moved;
}

}  // namespace terrace
