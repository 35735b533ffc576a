#include "memory/access_stream.h"

#include "base/clock.h"
#include "base/error.h"

namespace terrace {

Pin& Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    stream_ = std::exchange(other.stream_, nullptr);
    held_ = std::move(other.held_);
  }
  return *this;
}

void Pin::release() noexcept {
  if (stream_ != nullptr) {
    std::exchange(stream_, nullptr)->release(*this);
    held_.clear();
  }
}

std::span<std::byte> Pin::host_bytes(std::size_t position, std::uint64_t offset) const {
  const std::uint64_t granule_bytes = stream_->granule_bytes();
  const std::uint64_t within = offset % granule_bytes;
  return {host(position)[static_cast<std::size_t>(offset / granule_bytes)] + within,
          static_cast<std::size_t>(granule_bytes - within)};
}

AccessStream::AccessStream(std::array<Budget*, tier_count> budgets, std::uint64_t device_chunk_limit, Device& device,
                           HostArena& arena, NvmeStore* store)
    : budgets_(budgets),
      staging_(*budgets[index_of(Tier::host)], Kind::other, Mover::staging_blocks * arena.granule_bytes()),
      policy_(budgets, device_chunk_limit),
      mover_(device, arena, store) {}

ChunkId AccessStream::add_chunk(Kind kind, std::uint32_t index, std::uint64_t bytes, Tier home) {
  const ChunkInfo info{.kind = kind, .index = index, .bytes = bytes, .home = home, .room_bytes = room_bytes(bytes)};
  // Copies that only happen to be at its home make room for it.
  Lock lock(mutex_);
  make_room(info.room_bytes[index_of(home)], kind, home, lock);
  budgets_[index_of(home)]->release(kind, info.room_bytes[index_of(home)]);
  const ChunkId id = policy_.add_chunk(info);
  mover_.add_chunk(id, info);
  return id;
}

Pin AccessStream::acquire(std::span<const Access> accesses) {
  Request request;
  request.accesses = accesses;
  Pin pin;
  pin.held_.reserve(accesses.size());
  Lock lock(mutex_);
  policy_.submit(request);
  settle(request, lock);
  for (const Access& access : accesses) {
    pin.held_.emplace_back(access, &mover_.place(access.chunk));
  }
  pin.stream_ = this;
  return pin;
}

void AccessStream::allocate(std::uint64_t bytes, Kind kind, Tier tier) {
  if (budgets_[index_of(tier)]->try_reserve(kind, bytes)) {
    return;
  }
  Lock lock(mutex_);
  make_room(bytes, kind, tier, lock);
}

void AccessStream::free(std::uint64_t bytes, Kind kind, Tier tier) noexcept {
  budgets_[index_of(tier)]->release(kind, bytes);
}

void AccessStream::make_room(std::uint64_t bytes, Kind kind, Tier tier, Lock& lock) {
  Request room;
  room.program_bytes = bytes;
  room.program_kind = kind;
  room.program_tier = tier;
  policy_.submit(room);
  settle(room, lock);
}

void AccessStream::discard(ChunkId chunk) {
  const Lock lock(mutex_);
  policy_.discard(chunk);
  carry_out_vacates(lock);
  changed_.notify_all();
}

void AccessStream::step_mark() {
  const Lock lock(mutex_);
  policy_.step_mark();
  for (const Tier tier : all_tiers) {
    step_peaks_[index_of(tier)] = budgets_[index_of(tier)]->take_step_peak();
  }
}

MemoryUsage AccessStream::usage() const {
  MemoryUsage usage;
  usage.bytes_moved = mover_.moved();
  usage.stall_seconds = static_cast<double>(stalled_ns_.load(std::memory_order_relaxed)) * 1e-9;
  const Lock lock(mutex_);
  for (const Tier tier : all_tiers) {
    const std::size_t at = index_of(tier);
    MemoryUsage::OfTier& figures = usage.tiers[at];
    const Budget& budget = *budgets_[at];
    figures.capacity = budget.capacity();
    figures.now = budget.used();
    figures.peak = budget.peak();
    figures.step_peak = step_peaks_[at];
    figures.chunk_peak = policy_.peak_chunk_bytes(tier);
    for (const Kind kind : all_kinds) {
      figures.now_by_kind[index_of(kind)] = budget.used(kind);
      figures.peak_by_kind[index_of(kind)] = budget.peak(kind);
    }
  }
  return usage;
}

/// Where nothing can be thrown to a caller, an error goes to everybody who asks from now on.
template <class Event>
void AccessStream::guarded(Event&& event) noexcept {
  try {
    event();
  } catch (...) {
    policy_.fail(std::current_exception());
  }
}

void AccessStream::release(const Pin& pin) noexcept {
  std::vector<Access> accesses;
  accesses.reserve(pin.held_.size());
  for (const auto& [access, place] : pin.held_) {
    accesses.push_back(access);
  }
  const Lock lock(mutex_);
  guarded([&] {
    policy_.release(accesses);
    carry_out_vacates(lock);
  });
  changed_.notify_all();
}

void AccessStream::settle(Request& request, Lock& lock) {
  carry_out_vacates(lock);
  changed_.notify_all();  // what was asked for may have moved on those who asked before
  if (request.verdict == Request::Verdict::waiting) {
    const Stopwatch stopwatch;
    while (request.verdict == Request::Verdict::waiting) {
      if (const auto transfer = policy_.next_transfer()) {
        carry_out(*transfer, lock);
      } else {
        changed_.wait(lock);
      }
    }
    stalled_ns_.fetch_add(stopwatch.elapsed_ns(), std::memory_order_relaxed);
    changed_.notify_all();
  }
  if (request.verdict == Request::Verdict::refused) {
    std::rethrow_exception(request.error);
  }
}

void AccessStream::carry_out(const Transfer& transfer, Lock& lock) noexcept {
  ChunkPlace& place = mover_.place(transfer.chunk);
  lock.unlock();
  std::exception_ptr error;
  try {
    mover_.run(transfer, place);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  guarded([&] {
    if (error) {
      policy_.transfer_failed(transfer, error);
    } else {
      policy_.transfer_done(transfer);
    }
    carry_out_vacates(lock);
  });
  changed_.notify_all();
}

void AccessStream::carry_out_vacates(const Lock&) {
  while (const auto vacate = policy_.next_vacate()) {
    mover_.vacate(*vacate);
    policy_.vacated(*vacate);
  }
}

}  // namespace terrace
