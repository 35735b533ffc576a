#include "integration/spillable_storages.h"

#include <algorithm>
#include <optional>
#include <string>

#include "integration/storages_of.h"

namespace terrace {
namespace {

std::atomic<SpillableStorages*> current{nullptr};

/// The callback of each thread that builds tensors, while it does.
thread_local std::optional<at::CallbackHandle> observer;

/// What the last op of a thread that builds tensors has used.
thread_local std::vector<const c10::StorageImpl*> used_by_last_op;

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
    leave_room_for_updates();
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

void SpillableStorages::forget_dead(const Lock&) {
  reasons_to_look_ -= std::erase_if(entries_, [](const auto& item) {
    const Entry& entry = item.second;
    return entry.uses == 0 && (entry.place == Place::here || entry.place == Place::away) && entry.storage.expired();
  });
}

void SpillableStorages::wait_until_still(const Entry& entry, Lock& lock) {
  moved_.wait(lock, [&] { return entry.place == Place::here || entry.place == Place::away; });
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
