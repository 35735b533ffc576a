/// A LibTorch storage whose bytes are a run of a chunk.
///
/// The storage's own data pointer says so: its deleter is ours and its context is the ManagedStorage, which
/// it keeps alive; no table is needed to find one, and an address that is used again cannot be mistaken.
/// The storage is closed but for the time that ops on it run, or that it is gathered. A spilled one is that of an
/// ordinary tensor whose bytes are away (see SpillableStorages): it stays closed until it is detached again.
///
/// Threads: `pin_count`, what is kept and the storage's pointer change under the registry's mutex, which is held
/// briefly and with no other taken under it. No LibTorch memory is freed under it. `of` takes no lock: what it reads
/// changes only when a storage comes under management or leaves it, which for a storage that another thread uses at the
/// time is a race in the program, or kept off by a hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <oneapi/tbb/spin_mutex.h>

#include "memory/chunk.h"

namespace terrace {

class ManagedStorage;

/// The storage of a tensor that has one.
inline c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// What the storages of a session share; outlives them.
struct StorageRegistry {
  oneapi::tbb::spin_mutex mutex;
  /// Storages that died since they were last looked at.
  std::vector<std::shared_ptr<ManagedStorage>> gone;
  std::atomic<bool> any_gone{false};
};

class ManagedStorage : public std::enable_shared_from_this<ManagedStorage> {
 public:
  /// The storage's managed run, or null if it is an ordinary one.
  static ManagedStorage* of(c10::StorageImpl& storage) noexcept {
    return storage._mutable_data_ptr_no_checks().cast_context<ManagedStorage>(&on_storage_death);
  }
  static ManagedStorage* of(const c10::TensorImpl& tensor) noexcept {
    // An undefined tensor has none, as others that have no memory.
    c10::StorageImpl* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
    return storage != nullptr ? of(*storage) : nullptr;
  }
  static ManagedStorage* of(const at::Tensor& tensor) noexcept { return of(*tensor.unsafeGetTensorImpl()); }

  /// Turns `storage` into a run of `chunk` and closes it; what it pointed to is freed.
  static std::shared_ptr<ManagedStorage> attach(c10::StorageImpl& storage, ChunkId chunk, std::uint64_t offset_bytes,
                                                std::string name, std::shared_ptr<StorageRegistry> registry);
  /// The same for a chunk that the storage has for itself, to be brought back before an op uses it.
  static std::shared_ptr<ManagedStorage> attach_spilled(c10::StorageImpl& storage, ChunkId chunk,
                                                        std::shared_ptr<StorageRegistry> registry);

  /// Gives the storage `data` of its own and ends this object's part in it. The mutex is held by the caller.
  void detach(c10::DataPtr data);

  /// One more, or one less, op runs on it. `chunk_data` is where the chunk is on the device. The mutex is held
  /// by the caller.
  void open(std::byte* chunk_data);
  void close();
  bool is_open() const noexcept { return pin_count_ > 0; }
  /// What access throws from now on, until it is opened; an empty text gives back the usual message. The mutex is held
  /// by the caller.
  void set_error(const std::string& text);

  /// An op that was refused its bytes, for the reason `refusal`, runs on it all the same, for an interceptor cannot
  /// stop it: until that ends access throws `text`, and nobody may open it. The mutex is held by the caller.
  void begin_refused_op(const std::string& text, const std::exception_ptr& refusal);
  void end_refused_op();
  /// What who would open it is refused with as well; null where it may be opened. The mutex is held by the caller.
  const std::exception_ptr& refusal() const noexcept { return refusal_; }

  /// Has `what` live until the storage dies, or until this is called again.
  void keep(std::shared_ptr<void> what);

  /// For as long as what is returned lives: a block has read it and is to run again, and will want the same bytes.
  std::shared_ptr<const void> expect_reading();
  bool is_to_be_read_again() const noexcept { return readings_to_come_.load() > 0; }

  ChunkId chunk() const noexcept { return chunk_; }
  std::uint64_t offset_bytes() const noexcept { return offset_bytes_; }
  const std::string& name() const noexcept { return name_; }
  /// Whether it is an ordinary tensor's, whose bytes have left it for a chunk of their own.
  bool is_spilled() const noexcept { return is_spilled_; }
  StorageRegistry& registry() const noexcept { return *registry_; }
  /// An op uses it, in a pass of which the order of first uses is wanted, and which has seen `uses` of them. Any
  /// thread.
  void note_use(std::atomic<std::uint32_t>& uses) noexcept {
    if (first_use_.load(std::memory_order_relaxed) == 0) first_use_.store(++uses, std::memory_order_relaxed);
  }
  /// Which of the first uses was its own, from 1; 0 where none was seen.
  std::uint32_t first_use() const noexcept { return first_use_.load(std::memory_order_relaxed); }
  /// Null once the storage has died. The mutex is held by the caller.
  c10::StorageImpl* storage() const noexcept { return storage_; }

  ManagedStorage(ChunkId chunk, std::uint64_t offset_bytes, std::string name, std::shared_ptr<StorageRegistry> registry,
                 bool is_spilled);

 private:
  static std::shared_ptr<ManagedStorage> attach(c10::StorageImpl& storage, std::shared_ptr<ManagedStorage> managed);
  static void on_storage_death(void* context);
  std::string usual_message() const;

  const ChunkId chunk_;
  const std::uint64_t offset_bytes_;
  const std::string name_;
  const std::shared_ptr<StorageRegistry> registry_;
  const bool is_spilled_;
  c10::StorageImpl* storage_ = nullptr;
  std::shared_ptr<ManagedStorage> held_by_storage_;
  std::shared_ptr<void> kept_;
  std::uint32_t pin_count_ = 0;
  std::atomic<std::uint32_t> first_use_{0};
  std::atomic<std::uint32_t> readings_to_come_{0};
  bool has_error_ = false;
  std::uint32_t refused_ops_ = 0;
  std::exception_ptr refusal_;
};

}  // namespace terrace
