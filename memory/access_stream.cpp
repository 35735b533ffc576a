#include "memory/access_stream.h"

#include <algorithm>

#include "base/error.h"

namespace terrace {
namespace {

bool is_unanswered(const std::exception_ptr& error) {
  if (!error) {
    return false;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Unanswered&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Each of the paths may turn out to take nothing.
std::uint32_t write_attempts(const NvmeStore* store) {
  return store == nullptr ? 2 : std::max<std::uint32_t>(2, static_cast<std::uint32_t>(store->path_count()));
}

}  // namespace

Pin& Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    stream_ = std::exchange(other.stream_, nullptr);
    held_ = std::move(other.held_);
    places_ = std::move(other.places_);
  }
  return *this;
}

void Pin::release() noexcept {
  if (stream_ != nullptr) {
    std::exchange(stream_, nullptr)->release(held_);
    held_.clear();
    places_.clear();
  }
}

HostReading::~HostReading() {
  if (stream_ != nullptr) {
    stream_->end_reading(chunk_);
  }
}

std::span<std::byte> Pin::host_bytes(std::size_t position, std::uint64_t offset) const {
  const std::uint64_t granule_bytes = stream_->granule_bytes();
  const std::uint64_t within = offset % granule_bytes;
  return {host(position)[static_cast<std::size_t>(offset / granule_bytes)] + within,
          static_cast<std::size_t>(granule_bytes - within)};
}

AccessStream::AccessStream(std::array<Budget*, tier_count> budgets, Device& device, HostArena& arena, NvmeStore* store,
                           IoEngine* engine, const Options& options)
    : budgets_(budgets),
      timeline_(options.timeline != nullptr && options.timeline->keeps_events() ? options.timeline : nullptr),
      staging_(*budgets[index_of(Tier::host)], Kind::other,
               2 * options.staging_blocks_each_way * arena.granule_bytes()),
      policy_(budgets, options.device_chunk_limit, options.prefetch_depth, write_attempts(store)),
      places_(device, arena, store),
      most_under_way_(options.most_transfers),
      transfers_(device, arena, store, engine,
                 {.observer = timeline_,
                  .nvme_depth = options.nvme_depth,
                  .staging_blocks_each_way = options.staging_blocks_each_way,
                  .processors = options.transfer_processors}) {}

ChunkId AccessStream::add_chunk(Kind kind, std::uint32_t index, std::uint64_t bytes, Tier home,
                                const ChunkOptions& options) {
  ChunkInfo info{.kind = kind, .index = index, .bytes = bytes, .home = home, .room_bytes = room_bytes(bytes)};
  std::uint64_t& device_room = info.room_bytes[index_of(Tier::device)];
  device_room = std::max(device_room, options.device_room_bytes);
  Request request;
  request.new_chunk = info;
  {
    Lock lock(mutex_);
    if (options.in_place_of && policy_.is_gone(*options.in_place_of)) {
      request.in_place_of = options.in_place_of;
      // It may be filled ahead of need as soon as it is granted, before this thread goes on.
      places_.add_chunk(*request.in_place_of, info);
    }
    ask(request, lock, AccessOrigin::program);
    if (request.chunk != request.in_place_of) {
      places_.add_chunk(request.chunk, info);
    }
  }
  if (home == Tier::nvme) {
    set_space_aside(request.chunk, bytes);
  }
  return request.chunk;
}

void AccessStream::set_space_aside(ChunkId chunk, std::uint64_t bytes) {
  try {
    std::vector<ExtentId> extents = places_.reserve_extents(bytes);  // the drive may take its time: without the lock
    const Lock lock(mutex_);
    places_.set_extents(chunk, std::move(extents));
  } catch (...) {
    remove_chunk(chunk);
    throw;
  }
}

void AccessStream::adopt(ChunkId chunk, const Allocation& allocation, std::uint64_t offset, Kind counted_as) {
  {
    const Lock lock(mutex_);
    if (policy_.failure()) {
      std::rethrow_exception(policy_.failure());
    }
    places_.adopt(chunk, allocation, offset);
    try {
      policy_.adopt(chunk, counted_as);
    } catch (...) {
      places_.adopt(chunk, {}, 0);
      throw;
    }
    carry_out(lock);
  }
  sample_usage();
}

Pin AccessStream::acquire(std::span<const ChunkAccess> accesses, AccessOrigin origin) {
  Pin pin;
  pin.held_.assign(accesses.begin(), accesses.end());
  pin.places_.resize(accesses.size());
  acquire(accesses, origin, pin.places_);
  pin.stream_ = this;
  return pin;
}

void AccessStream::acquire(std::span<const ChunkAccess> accesses, AccessOrigin origin,
                           std::span<const ChunkPlace*> places) {
  if (!is_prior_work(origin)) {
    settle_prior_work(accesses);
  }
  const bool in_schedule = origin != AccessOrigin::beside_program;
  Lock lock(mutex_);
  bool granted = false;
  guarded([&] {
    granted = policy_.try_grant(accesses, in_schedule);
    carry_out(lock);
  });
  if (!granted) {
    Request request;
    request.accesses = accesses;
    request.in_schedule = in_schedule;
    request.patient = origin == AccessOrigin::background_work;
    ask(request, lock, origin);
  }
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    places[i] = &places_.place(accesses[i].chunk);
  }
}

void AccessStream::release(std::span<const ChunkAccess> accesses) noexcept {
  const Lock lock(mutex_);
  guarded([&] {
    policy_.release(accesses);
    places_.used(accesses);
    carry_out(lock);
  });
}

bool AccessStream::begin_pass(ScheduleBook::Key key, ScheduleBook::End end, std::optional<ChunkId> first) {
  const Lock lock(mutex_);
  const bool begins = policy_.begin_pass(key, end, first);
  carry_out(lock);
  if (timeline_ != nullptr) {
    timeline_->begin_first_step();
  }
  return begins;
}

void AccessStream::expect_step() {
  const Lock lock(mutex_);
  policy_.expect_step();
}

void AccessStream::announce(std::vector<ChunkId> chunks) {
  const Lock lock(mutex_);
  policy_.announce(std::move(chunks));
  carry_out(lock);
}

void AccessStream::set_update_queued(std::span<const ChunkId> chunks, bool queued) {
  const Lock lock(mutex_);
  policy_.set_update_queued(chunks, queued);
  carry_out(lock);
}

void AccessStream::update_done(ChunkId gradient) {
  const Lock lock(mutex_);
  policy_.update_done(gradient);
  carry_out(lock);
}

void AccessStream::set_updates_awaited(bool awaited) {
  const Lock lock(mutex_);
  policy_.set_updates_awaited(awaited);
  carry_out(lock);
}

void AccessStream::set_read_on_arrival(ChunkId chunk, bool wanted) {
  const Lock lock(mutex_);
  policy_.set_read_on_arrival(chunk, wanted);
  carry_out(lock);
}

std::optional<HostReading> AccessStream::await_reading(const std::atomic<bool>& stop) {
  Lock lock(mutex_);
  reading_there_.wait(lock, [&] { return policy_.has_readings() || stop.load(); });
  const std::optional<ChunkId> chunk = policy_.next_reading();
  if (!chunk) {
    return std::nullopt;
  }
  return HostReading(*this, *chunk, policy_.chunk(*chunk).writes, places_.place(*chunk).host);
}

void AccessStream::wake_reader() noexcept {
  const Lock lock(mutex_);  // who is about to wait has seen what this is to tell, or will be woken
  reading_there_.notify_all();
}

void AccessStream::end_reading(ChunkId chunk) noexcept {
  const Lock lock(mutex_);
  guarded([&] {
    policy_.reading_done(chunk);
    carry_out(lock);
  });
  changed_.notify_all();
}

std::uint64_t AccessStream::writes(ChunkId chunk) const {
  const Lock lock(mutex_);
  return policy_.chunk(chunk).writes;
}

void AccessStream::allocate(std::uint64_t bytes, Kind kind, Tier tier) {
  if (!budgets_[index_of(tier)]->try_reserve(kind, bytes)) {
    Request room;
    room.program_bytes = bytes;
    room.program_kind = kind;
    room.program_tier = tier;
    Lock lock(mutex_);
    ask(room, lock, AccessOrigin::program);
  }
  sample_usage();
}

void AccessStream::free(std::uint64_t bytes, Kind kind, Tier tier) noexcept {
  budgets_[index_of(tier)]->release(kind, bytes);
  sample_usage();
}

void AccessStream::discard(ChunkId chunk) {
  const Lock lock(mutex_);
  policy_.discard(chunk);
  carry_out(lock);
}

void AccessStream::remove_chunk(ChunkId chunk) {
  const Lock lock(mutex_);
  policy_.remove(chunk);
  carry_out(lock);
}

/// Where nothing can be thrown to a caller, an error goes to everybody who asks from now on.
template <class Event>
void AccessStream::guarded(Event&& event) noexcept {
  try {
    event();
  } catch (...) {
    policy_.fail(std::current_exception());
    changed_.notify_all();
  }
}

void AccessStream::add_spare_room(SpareRoom& room) {
  const Lock lock(mutex_);
  spare_rooms_.push_back(&room);
}

void AccessStream::remove_spare_room(SpareRoom& room) noexcept {
  const Lock lock(mutex_);
  std::erase(spare_rooms_, &room);
}

void AccessStream::ask(Request& request, Lock& lock, AccessOrigin origin) {
  do {
    submit(request, lock, origin);
  } while (request.verdict == Request::Verdict::refused && may_ask_again(request, lock));
  if (request.verdict == Request::Verdict::refused) {
    std::rethrow_exception(request.error);
  }
}

bool AccessStream::may_ask_again(Request& request, Lock& lock) {
  const bool wants_device = request.accesses.empty()
                                ? (request.new_chunk ? request.new_chunk->home : request.program_tier) == Tier::device
                                : std::any_of(request.accesses.begin(), request.accesses.end(),
                                              [](const ChunkAccess& access) { return access.tier == Tier::device; });
  if (spare_rooms_.empty() || !wants_device || policy_.failure()) {
    return false;
  }
  const std::vector<SpareRoom*> rooms = spare_rooms_;
  lock.unlock();
  const bool given_back = std::any_of(rooms.begin(), rooms.end(), [](SpareRoom* room) { return room->give_back(); });
  lock.lock();
  if (given_back) {
    request.verdict = Request::Verdict::waiting;
    request.error = nullptr;
    request.hurried = false;
  }
  return given_back;
}

void AccessStream::submit(Request& request, Lock& lock, AccessOrigin origin) {
  // The policy knows the request until it has a verdict: what goes wrong meanwhile has to be one.
  guarded([&] {
    policy_.submit(request);
    carry_out(lock);
  });
  if (request.verdict == Request::Verdict::waiting && policy_.failure()) {
    std::rethrow_exception(policy_.failure());
  }
  if (request.verdict == Request::Verdict::waiting) {
    await_verdict(request, lock, origin);
  }
}

void AccessStream::carry_out_decisions(const Lock&) {
  bool acted = false;
  for (;; acted = true) {
    if (const auto vacate = policy_.next_vacate()) {
      places_.vacate(*vacate);
      policy_.vacated(*vacate);
    } else if (const auto transfer = under_way_.size() < most_under_way_ ? policy_.next_transfer() : std::nullopt) {
      start(*transfer);
    } else if (const auto urgent = policy_.next_urgent()) {
      hurry({urgent->chunk, urgent->to});
    } else {
      break;
    }
  }
  if (acted) {
    sample_usage();
  }
  // Who waits is woken only where it may make a difference.
  if (policy_.take_was_served() || acted) {
    changed_.notify_all();
  }
}

void AccessStream::hurry(const Arrival& arrival) {
  if (const auto found = under_way_.find(arrival); found != under_way_.end()) {
    transfers_.raise(found->second, TransferPriority::demand);
  } else if (under_way_.size() >= most_under_way_) {
    awaited_.insert(arrival);
  }
}

void AccessStream::start(const Transfer& transfer) {
  TransferRequest request = places_.request(transfer);
  if (awaited_.erase({transfer.chunk, transfer.to}) > 0) {
    request.priority = TransferPriority::demand;
  }
  request.done = [this, transfer](std::exception_ptr error) { finished(transfer, std::move(error)); };
  under_way_[{transfer.chunk, transfer.to}] = transfers_.start(std::move(request));
}

void AccessStream::finished(const Transfer& transfer, std::exception_ptr error) noexcept {
  const Lock lock(mutex_);
  guarded([&] {
    under_way_.erase({transfer.chunk, transfer.to});
    if (is_unanswered(error)) {
      places_.abandon(transfer);
      policy_.fail(error);  // for the policy it goes on for ever: its room is never free again
    } else if (error) {
      places_.failed(transfer);
      policy_.transfer_failed(transfer, error);
    } else {
      places_.done(transfer);
      policy_.transfer_done(transfer);
    }
    carry_out(lock);
  });
  changed_.notify_all();  // what is waited for may be another now
  if (policy_.has_readings()) {
    reading_there_.notify_one();
  }
}

}  // namespace terrace
