#include "integration/spillable_storages.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/log.h"

namespace terrace {
namespace {

std::atomic<SpillableStorages*> current{nullptr};

/// The callback of each thread that builds tensors, while it does.
thread_local std::optional<at::CallbackHandle> observer;

/// What the last op of a thread that builds tensors has used.
thread_local std::vector<const c10::StorageImpl*> used_by_last_op;

template <class Visit>
void visit_storages(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && value.toTensor().has_storage()) {
      visit(storage_of(value.toTensor()));
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_storages(element, visit);
    }
  }
}

/// Copies between a block and the chunk that `pin` holds alone on the host.
template <class Copy>
void copy_pieces(const Pin& pin, std::uint64_t bytes, Copy&& copy) {
  for (std::uint64_t done = 0; done < bytes;) {
    const std::span<std::byte> piece = pin.host_bytes(0, done);
    const std::uint64_t length = std::min<std::uint64_t>(piece.size(), bytes - done);
    copy(piece.data(), done, length);
    done += length;
  }
}

}  // namespace

SpillableStorages::SpillableStorages(SessionMemory& memory, std::shared_ptr<StorageRegistry> registry,
                                     std::function<void(std::exception_ptr)> failed, std::function<void()> notice_dead)
    : memory_(memory),
      registry_(std::move(registry)),
      failed_(std::move(failed)),
      notice_dead_(std::move(notice_dead)) {
  if (memory_.has_nvme()) {
    memory_.set_host_room(this);
    current.store(this, std::memory_order_release);
  }
}

SpillableStorages::~SpillableStorages() {
  current.store(nullptr, std::memory_order_release);
  memory_.set_host_room(nullptr);
}

SpillableStorages* SpillableStorages::active() noexcept {
  SpillableStorages* const storages = current.load(std::memory_order_acquire);
  return storages != nullptr && storages->reasons_to_look_.load(std::memory_order_relaxed) > 0 ? storages : nullptr;
}

SpillableStorages::OpFrame::~OpFrame() {
  innermost = outer_;
  if (outer_ != nullptr) {
    return;
  }
  if (SessionMemory::is_constructing()) {
    used_by_last_op.swap(used_);
  }
  for (const c10::StorageImpl* storage : used_) {
    owner_.let_go(*storage);
  }
}

void SpillableStorages::let_go_of_last_op() noexcept {
  for (const c10::StorageImpl* storage : used_by_last_op) {
    let_go(*storage);
  }
  used_by_last_op.clear();
}

std::unique_ptr<SpillableStorages::OpFrame> SpillableStorages::begin_op(c10::ArrayRef<const c10::IValue> inputs,
                                                                        bool touches_bytes) {
  if (OpFrame::innermost == nullptr) {
    let_go_of_last_op();
  }
  auto frame = std::make_unique<OpFrame>(*this);
  for (const c10::IValue& input : inputs) {
    use(*frame, input, touches_bytes);
  }
  return frame;
}

void SpillableStorages::use(OpFrame& frame, const c10::IValue& value, bool touches_bytes) {
  visit_storages(value, [&](c10::StorageImpl& storage) {
    Lock lock(mutex_);
    Entry* const entry = find(storage, lock);
    if (entry == nullptr) {
      return;
    }
    frame.outermost_.used_.push_back(&storage);
    ++entry->uses;
    entry->last_use = ++clock_;
    if (!touches_bytes) {
      return;
    }
    try {
      bring_back(storage, *entry, lock);
    } catch (const std::exception& error) {
      failed_(std::current_exception());
      const std::scoped_lock registry_lock(registry_->mutex);
      if (entry->run) {
        entry->run->set_error(std::string("terrace: the bytes of a tensor under construction could not come back: ") +
                              error.what());
      }
    }
  });
}

void SpillableStorages::after_op(const at::RecordFunction& function, at::ObserverContext*) {
  SpillableStorages* const storages = active();
  if (storages == nullptr) {
    return;
  }
  for (const c10::IValue& output : function.outputs()) {
    visit_storages(output, [&](c10::StorageImpl& storage) {
      const Lock lock(storages->mutex_);
      Entry* const entry = storages->find(storage, lock);
      if (entry == nullptr) {
        return;
      }
      entry->last_use = ++storages->clock_;
      if (OpFrame* const frame = OpFrame::innermost) {
        frame->outermost_.used_.push_back(&storage);
        ++entry->uses;
      }
    });
  }
}

void SpillableStorages::begin_construction() {
  if (!memory_.has_nvme()) {
    return;
  }
  ++reasons_to_look_;
  if (!observer) {
    observer = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction&) { return std::unique_ptr<at::ObserverContext>(); },
                                   &after_op)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
}

void SpillableStorages::end_construction() noexcept {
  if (!memory_.has_nvme()) {
    return;
  }
  --reasons_to_look_;
  if (observer && !SessionMemory::is_constructing()) {
    at::removeCallback(*observer);
    observer.reset();
    let_go_of_last_op();
    try {
      leave_free(0);
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("tensors under construction take of the room for updates: ") + error.what());
    }
  }
}

SpillableStorages::Hold SpillableStorages::hold(c10::StorageImpl& storage) {
  Lock lock(mutex_);
  Entry* const entry = find(storage, lock);
  if (entry == nullptr) {
    return {};
  }
  ++entry->uses;
  entry->last_use = ++clock_;
  wait_until_still(*entry, lock);
  return {*this, storage};
}

SpillableStorages::Hold SpillableStorages::hold_here(c10::StorageImpl& storage) {
  Hold held = hold(storage);
  Lock lock(mutex_);
  if (Entry* const entry = find(storage, lock)) {
    bring_back(storage, *entry, lock);
  }
  return held;
}

void SpillableStorages::let_go(const c10::StorageImpl& storage) noexcept {
  const Lock lock(mutex_);
  if (const auto found = entries_.find(&storage); found != entries_.end() && found->second.uses > 0) {
    --found->second.uses;
  }
}

void SpillableStorages::forget(const c10::StorageImpl& storage) noexcept {
  const Lock lock(mutex_);
  reasons_to_look_ -= entries_.erase(&storage);
}

SpillableStorages::Entry* SpillableStorages::find(c10::StorageImpl& storage, const Lock& lock) {
  if (const auto found = entries_.find(&storage); found != entries_.end()) {
    return &found->second;
  }
  if (!can_leave(storage)) {
    return nullptr;
  }
  if (entries_.size() >= look_for_dead_at_) {
    forget_dead(lock);
    look_for_dead_at_ = std::max<std::size_t>(64, 2 * entries_.size());
  }
  ++reasons_to_look_;
  auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage);
  return &entries_.try_emplace(&storage, std::move(weak)).first->second;
}

bool SpillableStorages::can_leave(c10::StorageImpl& storage) const {
  return storage.nbytes() >= memory_.stream().granule_bytes() && storage.nbytes() <= largest_that_leaves() &&
         bytes_counted_by(*memory_.host_source(), storage._mutable_data_ptr_no_checks()) > 0;
}

std::uint64_t SpillableStorages::largest_that_leaves() const {
  const std::uint64_t capacity = memory_.budget(Tier::host).capacity();
  const std::uint64_t kept = std::min<std::uint64_t>(capacity, kept_from_blocks_);
  const std::uint64_t both = (capacity - kept) / 2;
  return both - std::min<std::uint64_t>(both, memory_.stream().granule_bytes());
}

void SpillableStorages::forget_dead(const Lock&) {
  reasons_to_look_ -= std::erase_if(entries_, [](const auto& item) {
    const Entry& entry = item.second;
    return entry.uses == 0 && (entry.place == Place::here || entry.place == Place::away) && entry.storage.expired();
  });
}

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

void SpillableStorages::wait_until_still(const Entry& entry, Lock& lock) {
  moved_.wait(lock, [&] { return entry.place == Place::here || entry.place == Place::away; });
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
    copy_pieces(pin, bytes, [&](const std::byte* piece, std::uint64_t at, std::uint64_t length) {
      std::memcpy(destination + at, piece, length);
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
    chunk = memory_.stream().add_chunk(Kind::parameter, 0, bytes, Tier::nvme);
    entry->nvme_bytes = memory_.stream().room_bytes(bytes)[index_of(Tier::nvme)];
    const std::array accesses{ChunkAccess{*chunk, Tier::host, Access::write}};
    const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
    const auto* const source = static_cast<const std::byte*>(storage->data());
    copy_pieces(pin, bytes, [&](std::byte* piece, std::uint64_t at, std::uint64_t length) {
      std::memcpy(piece, source + at, length);
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

bool SpillableStorages::leaves_free(std::uint64_t bytes, const Lock&) const {
  const Budget& host = memory_.budget(Tier::host);
  return host.used(Kind::other) + kept_from_blocks_ + promised_ + bytes <= host.capacity();
}

void SpillableStorages::before_block(std::uint64_t bytes) {
  if (OpFrame::innermost == nullptr) {
    let_go_of_last_op();
  }
  // What an op uses that nobody sees is not known; and for what cannot fit nothing need leave.
  const bool may_make_room =
      at::isRecordFunctionEnabled() && bytes + kept_from_blocks_ <= memory_.budget(Tier::host).capacity();
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

bool SpillableStorages::is_used_by_more_than(std::uint32_t count, const c10::StorageImpl& storage) const {
  const Lock lock(mutex_);
  const auto found = entries_.find(&storage);
  return found != entries_.end() && found->second.uses > count;
}

std::vector<std::shared_ptr<ManagedStorage>> SpillableStorages::away() const {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<ManagedStorage>> runs;
  for (const auto& [address, entry] : entries_) {
    if (entry.place == Place::away && !entry.storage.expired()) {
      runs.push_back(entry.run);
    }
  }
  return runs;
}

std::uint64_t SpillableStorages::nvme_bytes() const {
  const Lock lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& [address, entry] : entries_) {
    bytes += entry.place == Place::away && !entry.storage.expired() ? entry.nvme_bytes : 0;
  }
  return bytes;
}

}  // namespace terrace
