#include "integration/offloaded_activation.h"

#include <array>
#include <utility>

#include "base/error.h"
#include "integration/byte_copies.h"
#include "integration/storage_guard.h"
#include "memory/access_stream.h"

namespace terrace {

/// Behind a storage that was handed out.
struct OffloadedActivation::Opened {
  std::shared_ptr<OffloadedActivation> activation;
  Pin pin;

  static void on_storage_death(void* context) { delete static_cast<Opened*>(context); }
};

OffloadedActivation::OffloadedActivation(std::shared_ptr<OffloadedActivations> owner, c10::Storage storage)
    : owner_(std::move(owner)),
      bytes_(storage.nbytes()),
      storage_(std::move(storage)),
      opened_(c10::intrusive_ptr<c10::StorageImpl>()) {}

OffloadedActivation::~OffloadedActivation() {
  if (storage_) {
    owner_->forget(storage_.unsafeGetStorageImpl(), this);
  }
  if (chunk_) {
    owner_->give_back_chunk(*chunk_, bytes_);
  }
}

std::shared_ptr<OffloadedActivation> OffloadedActivation::of(c10::StorageImpl& storage) noexcept {
  const auto* const opened = storage._mutable_data_ptr_no_checks().cast_context<Opened>(&Opened::on_storage_death);
  return opened != nullptr ? opened->activation : nullptr;
}

OffloadedActivation::Departure OffloadedActivation::try_leave() noexcept {
  if (has_left_) {
    return Departure::never;  // who asks for it may be who makes room
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    return Departure::later;
  }
  try {
    return leave();
  } catch (...) {
    owner_->stays(std::current_exception());
    return Departure::never;
  }
}

OffloadedActivation::Departure OffloadedActivation::leave() {
  if (!storage_ || owner_->memory_ == nullptr) {
    return Departure::never;  // it has left before, or its session has ended and it stays
  }
  if (storage_.use_count() > 1) {
    return Departure::later;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // another thread may have been the last to write it
  if (storage_.nbytes() != bytes_) {
    return Departure::never;  // it was resized: it stays
  }
  if (!owner_->may_leave(bytes_)) {
    return Departure::never;
  }
  const ChunkId chunk = owner_->take_chunk(bytes_);
  try {
    move_to(chunk);
  } catch (const OutOfMemory&) {
    owner_->give_back_chunk(chunk, bytes_);
    return Departure::later;
  } catch (...) {
    owner_->give_back_chunk(chunk, bytes_);
    throw;
  }
  owner_->forget(storage_.unsafeGetStorageImpl(), this);
  chunk_ = chunk;
  has_left_ = true;
  {
    const std::scoped_lock owner_lock(owner_->mutex_);
    owner_->away_[chunk] = weak_from_this();
  }
  storage_ = c10::Storage();
  return Departure::has_left;
}

void OffloadedActivation::move_to(ChunkId chunk) {
  AccessStream& stream = owner_->memory_->stream();
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  const std::shared_ptr<BlockSource>& source = owner_->memory_->device_source();
  c10::DataPtr data = storage.set_data_ptr(c10::DataPtr());
  if (const auto block = take_block(source, bytes_, data)) {
    try {
      stream.adopt(chunk, {block->memory, block->bytes}, block->offset, block->kind);
      return;
    } catch (...) {
      storage.set_data_ptr(put_back_block(source, *block));
      throw;
    }
  }
  const void* const bytes = data.get();
  storage.set_data_ptr(std::move(data));
  const std::array accesses{ChunkAccess{chunk, Tier::device, Access::write}};
  owner_->memory_->computes_here();  // maybe on a stream on which nothing managed has been used yet
  const Pin pin = stream.acquire(accesses);
  copy_bytes(pin.device(0), owner_->device_, bytes, owner_->device_, bytes_);
}

c10::Storage OffloadedActivation::storage() {
  const std::scoped_lock lock(mutex_);
  if (storage_) {
    return storage_;
  }
  if (auto opened = opened_.lock()) {
    return c10::Storage(std::move(opened));
  }
  if (owner_->memory_ == nullptr) {
    throw LogicError("an activation is asked for whose session has ended, and the machine's memory could not hold it",
                     "end the session after the last backward");
  }
  owner_->memory_->computes_here();
  const std::array accesses{ChunkAccess{*chunk_, Tier::device, Access::read}};
  auto opened = std::make_unique<Opened>(Opened{shared_from_this(), owner_->memory_->stream().acquire(accesses)});
  void* const data = opened->pin.device(0);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes_,
      c10::DataPtr(data, opened.release(), &Opened::on_storage_death, owner_->device_), /*allocator=*/nullptr,
      /*resizable=*/false);
  opened_ = c10::weak_intrusive_ptr<c10::StorageImpl>(storage);
  return c10::Storage(std::move(storage));
}

void OffloadedActivation::become_ordinary() {
  const c10::Storage here = storage();
  c10::DataPtr data = allocate_ordinary(bytes_, owner_->device_);
  copy_bytes(data.get(), owner_->device_, here.data(), owner_->device_, bytes_);
  const std::scoped_lock lock(mutex_);
  c10::StorageImpl& storage = *here.unsafeGetStorageImpl();
  const std::unique_ptr<Opened> opened(  // its pin ends after this
      static_cast<Opened*>(storage._mutable_data_ptr_no_checks().get_context()));
  reset_storage(storage, std::move(data));
  chunk_.reset();
  storage_ = here;
}

void OffloadedActivation::end() noexcept {
  const std::scoped_lock lock(mutex_);
  if (const auto opened = opened_.lock()) {
    close_storage(*opened, "the session that held this activation has ended, and the machine's memory could not");
    static_cast<Opened*>(opened->_mutable_data_ptr_no_checks().get_context())->pin.release();
  }
}

}  // namespace terrace
