/// Tensors on the host whose bytes can leave it for NVMe: what lets `construct` build a model larger than memory.
///
/// A storage made under construction holds its bytes in a block of the host's budget. Where that has no room for
/// another, those used longest ago give up theirs: each becomes a closed storage over a chunk of its own that rests on
/// NVMe. Before an op touches such a storage its bytes come back to a block. What is smaller than a granule stays.
///
/// What an op uses stays where it is until the outermost op on its thread has ended; under construction, until the
/// thread's next op or tensor. So long a pointer is good that the program takes itself. The host's budget has to hold
/// the operands of one op, and the staging; what it does not hold twice cannot leave.
///
/// Thread-safe. No lock is held while bytes move; who needs a storage that another thread moves waits for that. Whether
/// a storage that may leave has left can be known only while it is held.
///
/// Who uses what is in spillable_storages.cpp, what moves when in spillable_moves.cpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include "integration/managed_storage.h"
#include "integration/session_memory.h"

namespace terrace {

class SpillableStorages final : public HostRoom {
 public:
  /// Without an NVMe tier nothing can leave. `failed` hears, under the mutex here, why bytes could not come back for an
  /// op; `notice_dead` has the chunks of spilled storages that died removed.
  SpillableStorages(SessionMemory& memory, std::shared_ptr<StorageRegistry> registry,
                    std::function<void(std::exception_ptr)> failed, std::function<void()> notice_dead);
  ~SpillableStorages() override;
  SpillableStorages(const SpillableStorages&) = delete;
  SpillableStorages& operator=(const SpillableStorages&) = delete;

  /// That of the session which lives, while there may be storages that can leave or have left; otherwise null.
  static SpillableStorages* active() noexcept;

  /// An op that runs, as long as this lives, and what it uses. On the thread that made it, in LIFO order.
  class OpFrame final : public at::ObserverContext {
   public:
    explicit OpFrame(SpillableStorages& owner) noexcept
        : owner_(owner),
          outer_(std::exchange(innermost, this)),
          outermost_(outer_ != nullptr ? outer_->outermost_ : *this) {}
    ~OpFrame() override;
    OpFrame(const OpFrame&) = delete;
    OpFrame& operator=(const OpFrame&) = delete;

    std::unique_ptr<at::ObserverContext> pins;  ///< of the op's managed operands

   private:
    friend class SpillableStorages;
    static inline thread_local OpFrame* innermost = nullptr;

    SpillableStorages& owner_;
    OpFrame* const outer_;
    OpFrame& outermost_;
    std::vector<const c10::StorageImpl*> used_;  ///< by it and the ops within it, where it is the outermost
  };

  /// An op begins with these inputs. If it touches bytes, those that have left come back; what cannot stays closed, and
  /// throws the reason when it is touched.
  std::unique_ptr<OpFrame> begin_op(c10::ArrayRef<const c10::IValue> inputs, bool touches_bytes);

  /// Between these the calling thread builds tensors: what its ops return can leave too.
  void begin_construction();
  void end_construction() noexcept;

  /// Keeps a storage where it is, for as long as this lives. Movable.
  class Hold {
   public:
    Hold() noexcept = default;
    Hold(Hold&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)), storage_(std::exchange(other.storage_, nullptr)) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(owner_, other.owner_);
      std::swap(storage_, other.storage_);
      return *this;
    }
    ~Hold() {
      if (owner_ != nullptr) {
        owner_->let_go(*storage_);
      }
    }

   private:
    friend class SpillableStorages;
    Hold(SpillableStorages& owner, const c10::StorageImpl& storage) noexcept : owner_(&owner), storage_(&storage) {}

    SpillableStorages* owner_ = nullptr;
    const c10::StorageImpl* storage_ = nullptr;
  };

  /// Of a storage that can leave or has left; any other needs none.
  Hold hold(c10::StorageImpl& storage);
  /// The same, with its bytes brought back.
  Hold hold_here(c10::StorageImpl& storage);
  /// Whether anybody but `count` holders uses the storage.
  bool is_used_by_more_than(std::uint32_t count, const c10::StorageImpl& storage) const;
  /// The storage's bytes have another place now.
  void forget(const c10::StorageImpl& storage) noexcept;

  /// Room on the host for chunks that tensors move into: storages leave for it, as far as they can. While it lives
  /// nothing else moves, and its thread makes no tensors.
  class Room {
   public:
    Room(SpillableStorages& owner, std::uint64_t bytes);
    ~Room();
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    SpillableStorages& owner_;
    const std::uint64_t bytes_;
  };

  /// While it lives no update is to bring anything to the host, which its owner sees to: what is kept for updates is
  /// there for blocks, and for the chunks that these leave for.
  class NoUpdates {
   public:
    explicit NoUpdates(SpillableStorages& owner) noexcept : owner_(owner) { ++owner_.without_updates_; }
    ~NoUpdates() { --owner_.without_updates_; }
    NoUpdates(const NoUpdates&) = delete;
    NoUpdates& operator=(const NoUpdates&) = delete;

   private:
    SpillableStorages& owner_;
  };

  /// What has left and is still needed.
  std::vector<std::shared_ptr<ManagedStorage>> away() const;
  /// Room on NVMe that it takes.
  std::uint64_t nvme_bytes() const;
  /// So much of the host's budget is for chunks: what is at home there, and what an update brings.
  void keep_from_blocks(std::uint64_t resting, std::uint64_t updates) noexcept {
    kept_for_resting_ = resting;
    kept_for_updates_ = updates;
  }
  /// Has storages leave until blocks and what is kept from them leave `bytes` of the host's budget, as far as that
  /// goes.
  void leave_free(std::uint64_t bytes);
  /// What is kept from them, as far as that goes; warns where it does not.
  void leave_room_for_updates() noexcept;

  // HostRoom
  void before_block(std::uint64_t bytes) override;
  void after_block(std::uint64_t bytes) noexcept override;

 private:
  enum class Place : std::uint8_t { here, leaving, away, coming };

  struct Entry {
    explicit Entry(c10::weak_intrusive_ptr<c10::StorageImpl> of) : storage(std::move(of)) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< so that its address stays its own
    Place place = Place::here;
    std::uint32_t uses = 0;
    std::uint64_t last_use = 0;
    std::shared_ptr<ManagedStorage> run;  ///< while it is away
    std::uint64_t nvme_bytes = 0;         ///< likewise
  };
  using Lock = std::unique_lock<std::mutex>;

  static void after_op(const at::RecordFunction& function, at::ObserverContext* context);

  void let_go(const c10::StorageImpl& storage) noexcept;
  /// Ends the uses of this thread's last op.
  void let_go_of_last_op() noexcept;
  /// What the host does not hold twice cannot be copied into a chunk.
  bool can_leave(c10::StorageImpl& storage) const;
  std::uint64_t largest_that_leaves() const;
  std::uint64_t kept_from_blocks() const noexcept {
    return kept_for_resting_ + (without_updates_ > 0 ? 0 : kept_for_updates_.load());
  }
  void use(OpFrame& frame, const c10::IValue& value, bool touches_bytes);
  /// The entry of a storage that can leave, or null. What is met for the first time gets one.
  Entry* find(c10::StorageImpl& storage, const Lock&);
  void wait_until_still(const Entry& entry, Lock& lock);
  /// Bytes move one storage at a time, so that there is room beside the blocks for what moves.
  class Turn;
  void begin_turn();
  void end_turn() noexcept;
  /// Makes room for that many bytes and `spare` more, as far as storages can leave, and promises the bytes.
  void promise(std::uint64_t bytes, std::uint64_t spare);
  void bring_back(c10::StorageImpl& storage, Entry& entry, Lock& lock);
  void bring_back(c10::StorageImpl& storage, Entry& entry);
  /// The one that was used longest ago leaves. False if there is none that could.
  bool spill_one();
  ChunkId add_chunk_to_leave_for(std::uint64_t bytes);
  Entry* longest_unused(c10::intrusive_ptr<c10::StorageImpl>& storage, const Lock&);
  void settle(Entry& entry, Place place, std::shared_ptr<ManagedStorage> run) noexcept;
  void forget_dead(const Lock&);
  bool leaves_free(std::uint64_t bytes, const Lock&) const;

  SessionMemory& memory_;
  const std::shared_ptr<StorageRegistry> registry_;
  const std::function<void(std::exception_ptr)> failed_;
  const std::function<void()> notice_dead_;
  std::atomic<std::uint64_t> kept_for_resting_{0};
  std::atomic<std::uint64_t> kept_for_updates_{0};
  std::atomic<int> without_updates_{0};
  std::atomic<std::size_t> reasons_to_look_{0};  ///< entries, and constructions under way
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  std::uint64_t clock_ = 0;
  std::uint64_t largest_block_ = 0;
  std::uint64_t promised_ = 0;  ///< to blocks that are about to be taken
  bool is_moving_ = false;
  std::size_t look_for_dead_at_ = 64;  ///< entries
};

}  // namespace terrace
