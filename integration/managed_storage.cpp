#include "integration/managed_storage.h"

#include <mutex>
#include <utility>

#include "integration/storage_guard.h"

namespace terrace {

ManagedStorage::ManagedStorage(ChunkId chunk, std::uint64_t offset_bytes, std::string name,
                               std::shared_ptr<StorageRegistry> registry, bool is_spilled)
    : chunk_(chunk),
      offset_bytes_(offset_bytes),
      name_(std::move(name)),
      registry_(std::move(registry)),
      is_spilled_(is_spilled) {}

std::shared_ptr<ManagedStorage> ManagedStorage::attach(c10::StorageImpl& storage, ChunkId chunk,
                                                       std::uint64_t offset_bytes, std::string name,
                                                       std::shared_ptr<StorageRegistry> registry) {
  return attach(storage, std::make_shared<ManagedStorage>(chunk, offset_bytes, std::move(name), std::move(registry),
                                                          /*is_spilled=*/false));
}

std::shared_ptr<ManagedStorage> ManagedStorage::attach_spilled(c10::StorageImpl& storage, ChunkId chunk,
                                                               std::shared_ptr<StorageRegistry> registry) {
  return attach(storage, std::make_shared<ManagedStorage>(chunk, 0, "a tensor under construction", std::move(registry),
                                                          /*is_spilled=*/true));
}

std::shared_ptr<ManagedStorage> ManagedStorage::attach(c10::StorageImpl& storage,
                                                       std::shared_ptr<ManagedStorage> managed) {
  const auto device = storage.device();
  storage.set_data_ptr_noswap({nullptr, managed.get(), &on_storage_death, device});
  close_storage(storage, managed->usual_message());
  const std::scoped_lock lock(managed->registry_->mutex);
  managed->storage_ = &storage;
  managed->held_by_storage_ = managed;
  return managed;
}

void ManagedStorage::detach(c10::DataPtr data) {
  reset_storage(*storage_, std::move(data));
  storage_ = nullptr;
  held_by_storage_.reset();
}

void ManagedStorage::open(std::byte* chunk_data) {
  if (storage_ != nullptr && (pin_count_ == 0 || has_error_)) {
    if (has_error_) {
      set_error({});
    }
    open_storage(*storage_, chunk_data + offset_bytes_);
  }
  ++pin_count_;
}

void ManagedStorage::close() {
  if (--pin_count_ == 0 && storage_ != nullptr) {
    close_storage(*storage_);
  }
}

void ManagedStorage::set_error(const std::string& text) {
  if (storage_ != nullptr) {
    has_error_ = !text.empty();
    close_storage(*storage_, has_error_ ? text : usual_message());
  }
}

void ManagedStorage::begin_refused_op(const std::string& text, const std::exception_ptr& refusal) {
  if (refused_ops_++ == 0) {  // the message of another may be being read
    set_error(text);
    refusal_ = refusal;
  }
}

void ManagedStorage::end_refused_op() {
  if (--refused_ops_ == 0) {
    refusal_ = nullptr;
  }
}

void ManagedStorage::keep(std::shared_ptr<void> what) {
  const std::scoped_lock lock(registry_->mutex);
  kept_.swap(what);  // what it was ends with the argument, after the lock
}

std::shared_ptr<const void> ManagedStorage::expect_reading() {
  ++readings_to_come_;
  return {this, [self = shared_from_this()](const void*) { --self->readings_to_come_; }};
}

void ManagedStorage::on_storage_death(void* context) {
  auto* managed = static_cast<ManagedStorage*>(context);
  const std::shared_ptr<StorageRegistry> registry = managed->registry_;
  std::shared_ptr<void> kept;  // ends after the lock
  std::shared_ptr<ManagedStorage> self;
  const std::scoped_lock lock(registry->mutex);
  kept = std::move(managed->kept_);
  managed->storage_ = nullptr;
  self = std::move(managed->held_by_storage_);
  registry->gone.push_back(self);
  registry->any_gone.store(true, std::memory_order_release);
}

std::string ManagedStorage::usual_message() const {
  return "terrace: the bytes of '" + name_ +
         "' are managed: they can be touched by ops, or by pointer while Session::gather holds them";
}

}  // namespace terrace
