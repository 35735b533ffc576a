// How spillable storages leave the host and come back, and how much of it they leave free.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "integration/pinned_run.h"
#include "integration/spillable_storages.h"

namespace terrace {

class SpillableStorages::Turn {
 public:
  explicit Turn(SpillableStorages& owner) : owner_(owner) { owner_.begin_turn(); }
  ~Turn() { owner_.end_turn(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  SpillableStorages& owner_;
};

void SpillableStorages::begin_turn() {
  Lock lock(mutex_);
  moved_.wait(lock, [&] { return !is_moving_; });
  is_moving_ = true;
}

void SpillableStorages::end_turn() noexcept {
  const Lock lock(mutex_);
  is_moving_ = false;
  moved_.notify_all();
}

SpillableStorages::Room::Room(SpillableStorages& owner, std::uint64_t bytes) : owner_(owner), bytes_(bytes) {
  owner_.promise(bytes_, 0);
  owner_.begin_turn();
}

SpillableStorages::Room::~Room() {
  owner_.end_turn();
  owner_.after_block(bytes_);
}

bool SpillableStorages::can_leave(c10::StorageImpl& storage) const {
  return memory_.has_nvme() && storage.nbytes() >= memory_.stream().granule_bytes() &&
         storage.nbytes() <= largest_that_leaves() &&
         bytes_counted_by(*memory_.host_source(), storage._mutable_data_ptr_no_checks()) > 0;
}

std::uint64_t SpillableStorages::largest_that_leaves() const {
  const std::uint64_t capacity = memory_.budget(Tier::host).capacity();
  const std::uint64_t kept = std::min(capacity, kept_from_blocks());
  const std::uint64_t both = (capacity - kept) / 2;
  return both - std::min<std::uint64_t>(both, memory_.stream().granule_bytes());
}

void SpillableStorages::bring_back(c10::StorageImpl& storage, Entry& entry, Lock& lock) {
  wait_until_still(entry, lock);
  if (entry.place == Place::here) {
    return;
  }
  lock.unlock();
  try {
    bring_back(storage, entry);
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
}

void SpillableStorages::bring_back(c10::StorageImpl& storage, Entry& entry) {
  const std::uint64_t bytes = storage.nbytes();
  c10::DataPtr block = allocate_from(memory_.host_source(), bytes, Kind::other);  // others may leave for it
  const Turn turn(*this);
  std::shared_ptr<ManagedStorage> run;
  {
    const Lock lock(mutex_);
    if (entry.place == Place::here) {
      return;  // another thread was first
    }
    entry.place = Place::coming;
    run = entry.run;
  }
  try {
    const std::array accesses{ChunkAccess{run->chunk(), Tier::host, Access::read}};
    const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
    auto* const destination = static_cast<std::byte*>(block.mutable_get());
    visit_pinned_run(pin, 0, bytes, [&](std::span<const std::byte> piece, std::uint64_t done) {
      std::memcpy(destination + done, piece.data(), piece.size());
    });
  } catch (...) {
    settle(entry, Place::away, std::move(run));
    throw;
  }
  {
    const std::scoped_lock registry_lock(registry_->mutex);
    run->detach(std::move(block));
  }
  settle(entry, Place::here, nullptr);
  memory_.stream().remove_chunk(run->chunk());
}

void SpillableStorages::settle(Entry& entry, Place place, std::shared_ptr<ManagedStorage> run) noexcept {
  const Lock lock(mutex_);
  entry.place = place;
  entry.run = std::move(run);
  moved_.notify_all();
}

bool SpillableStorages::spill_one() {
  notice_dead_();
  const Turn turn(*this);
  c10::intrusive_ptr<c10::StorageImpl> storage;  // before the lock: what dies with it does so under none
  Entry* entry = nullptr;
  {
    const Lock lock(mutex_);
    entry = longest_unused(storage, lock);
    if (entry == nullptr) {
      return false;
    }
    entry->place = Place::leaving;
  }
  std::optional<ChunkId> chunk;
  try {
    const std::uint64_t bytes = storage->nbytes();
    chunk = add_chunk_to_leave_for(bytes);
    entry->nvme_bytes = memory_.stream().room_bytes(bytes)[index_of(Tier::nvme)];
    const std::array accesses{ChunkAccess{*chunk, Tier::host, Access::write}};
    const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
    const auto* const source = static_cast<const std::byte*>(storage->data());
    visit_pinned_run(pin, 0, bytes, [&](std::span<std::byte> piece, std::uint64_t done) {
      std::memcpy(piece.data(), source + done, piece.size());
    });
    settle(*entry, Place::away, ManagedStorage::attach_spilled(*storage, *chunk, registry_));
  } catch (...) {
    settle(*entry, Place::here, nullptr);
    if (chunk) {
      memory_.stream().remove_chunk(*chunk);
    }
    throw;
  }
  return true;
}

ChunkId SpillableStorages::add_chunk_to_leave_for(std::uint64_t bytes) {
  try {
    return memory_.stream().add_chunk(Kind::parameter, 0, bytes, Tier::nvme);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory("nvme: there is no room for " + format_bytes(bytes) +
                          " of a tensor that is to leave the host for others; " + memory_.budget(Tier::nvme).describe(),
                      error.hint() + ", or host.memory, and more for what comes after it");
  }
}

SpillableStorages::Entry* SpillableStorages::longest_unused(c10::intrusive_ptr<c10::StorageImpl>& storage,
                                                            const Lock&) {
  for (;;) {
    Entry* longest = nullptr;
    for (auto& [address, entry] : entries_) {
      if (entry.place == Place::here && entry.uses == 0 && !entry.storage.expired() &&
          (longest == nullptr || entry.last_use < longest->last_use)) {
        longest = &entry;
      }
    }
    if (longest == nullptr) {
      return nullptr;
    }
    storage = longest->storage.lock();
    if (storage && can_leave(*storage)) {
      return longest;
    }
    if (storage) {  // it was resized, or more is kept for chunks now
      reasons_to_look_ -= entries_.erase(storage.get());
    }
  }
}

void SpillableStorages::leave_free(std::uint64_t bytes) { promise(0, bytes); }

void SpillableStorages::leave_room_for_updates() noexcept {
  try {
    leave_free(0);
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("tensors under construction take of the room for updates: ") + error.what());
  }
}

bool SpillableStorages::leaves_free(std::uint64_t bytes, const Lock&) const {
  const Budget& host = memory_.budget(Tier::host);
  return host.used(Kind::other) + kept_from_blocks() + promised_ + bytes <= host.capacity();
}

void SpillableStorages::before_block(std::uint64_t bytes) {
  if (OpFrame::innermost == nullptr) {
    let_go_of_last_op();
  }
  // What an op uses that nobody sees is not known; and for what cannot fit nothing need leave.
  const bool may_make_room =
      at::isRecordFunctionEnabled() && bytes + kept_from_blocks() <= memory_.budget(Tier::host).capacity();
  if (!may_make_room) {
    const Lock lock(mutex_);
    promised_ += bytes;
    return;
  }
  std::uint64_t largest = 0;
  {
    const Lock lock(mutex_);
    largest = largest_block_ = std::min(std::max(largest_block_, bytes), largest_that_leaves());
  }
  // What leaves is copied into a chunk first: room for the largest is kept for that.
  promise(bytes, largest + memory_.stream().granule_bytes());
}

void SpillableStorages::promise(std::uint64_t bytes, std::uint64_t spare) {
  for (bool can_leave = true;; can_leave = spill_one()) {
    const Lock lock(mutex_);
    if (!can_leave || leaves_free(bytes + spare, lock)) {
      promised_ += bytes;
      return;
    }
  }
}

void SpillableStorages::after_block(std::uint64_t bytes) noexcept {
  const Lock lock(mutex_);
  promised_ -= bytes;
}

}  // namespace terrace
