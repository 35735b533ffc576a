/// One storage that autograd has saved, wherever its bytes are.
///
/// Thread-safe; who asks for it while another thread moves it waits for that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include <c10/core/Storage.h>

#include "integration/offloaded_activations.h"

namespace terrace {

class OffloadedActivation final : public std::enable_shared_from_this<OffloadedActivation> {
 public:
  OffloadedActivation(std::shared_ptr<OffloadedActivations> owner, c10::Storage storage);
  ~OffloadedActivation();
  OffloadedActivation(const OffloadedActivation&) = delete;
  OffloadedActivation& operator=(const OffloadedActivation&) = delete;

  /// The one whose bytes a storage lies in that was handed out here, or null.
  static std::shared_ptr<OffloadedActivation> of(c10::StorageImpl& storage) noexcept;

  /// Leaves if nobody else holds the storage and its memory can be the chunk's, or the device has room for that beside
  /// it. False if it may do so later. Where it has nowhere to rest it stays for good, and the owner hears why.
  bool try_leave_or_stay() noexcept;
  /// The same, by a copy too where its memory may not be the chunk's. Whether it has left now.
  bool leaves_under_pressure() noexcept;
  /// A storage with its bytes on the device, to be read. Throws OutOfMemory, IoError or CorruptData, and LogicError
  /// after the session has ended without it.
  c10::Storage storage();
  /// The session ends: its bytes move to ordinary memory, from which a storage that was handed out has them too. Throws
  /// as `storage` does.
  void become_ordinary();
  /// The session ends without it: to ask for it, or touch a storage that was handed out, throws from now on.
  void end() noexcept;

  std::uint64_t bytes() const noexcept { return bytes_; }

  /// In whose list of what is to leave it is.
  bool is_pending_in(const void* list) const noexcept { return pending_in_.load(std::memory_order_relaxed) == list; }
  void set_pending_in(const void* list) noexcept { pending_in_.store(list, std::memory_order_relaxed); }

 private:
  struct Opened;
  enum class Departure : std::uint8_t { has_left, later, never };

  /// Throws OutOfMemory or IoError if it has nowhere to rest; then it is where it was.
  Departure try_leave(bool under_pressure);
  /// Its bytes become those of the chunk: in the memory where they are, or else by a copy. False where only pressure is
  /// worth that, as chunks may not take so much of the device. Throws OutOfMemory where neither can be now.
  bool move_to(ChunkId chunk, bool under_pressure);

  const std::shared_ptr<OffloadedActivations> owner_;
  const std::uint64_t bytes_;
  std::atomic<const void*> pending_in_{nullptr};
  std::mutex mutex_;
  bool only_under_pressure_ = false;  ///< its memory may not be the chunk's
  c10::Storage storage_;              ///< while it has not left
  std::optional<ChunkId> chunk_;      ///< once it has
  /// Handed out, and held by somebody perhaps.
  c10::weak_intrusive_ptr<c10::StorageImpl> opened_;
};

}  // namespace terrace
