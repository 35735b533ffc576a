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

  enum class Departure : std::uint8_t { has_left, later, never };

  /// Leaves if nobody else holds the storage and its memory can be the chunk's, or the device has room for that beside
  /// it. Where it has nowhere to rest it stays for good, and the owner hears why. Does not wait for another thread that
  /// asks for it: that is later.
  Departure try_leave() noexcept;
  /// A storage with its bytes on the device, to be read. Throws OutOfMemory, IoError or CorruptData, and LogicError
  /// after the session has ended without it.
  c10::Storage storage();
  /// The session ends: its bytes move to ordinary memory, from which a storage that was handed out has them too. Throws
  /// as `storage` does.
  void become_ordinary();
  /// The session ends without it: to ask for it, or touch a storage that was handed out, throws from now on.
  void end() noexcept;

  std::uint64_t bytes() const noexcept { return bytes_; }

  /// Whether it was not among what is to leave by now.
  bool becomes_pending() noexcept { return !is_pending_.exchange(true); }
  void is_pending_no_more() noexcept { is_pending_.store(false); }

 private:
  struct Opened;
  /// Throws OutOfMemory or IoError if it has nowhere to rest; then it is where it was. Under the mutex.
  Departure leave();
  /// Its bytes become those of the chunk: in the memory where they are, or else copied. Throws OutOfMemory where
  /// neither can be now.
  void move_to(ChunkId chunk);

  const std::shared_ptr<OffloadedActivations> owner_;
  const std::uint64_t bytes_;
  std::atomic<bool> is_pending_{false};
  std::atomic<bool> has_left_{false};
  std::mutex mutex_;
  c10::Storage storage_;          ///< while it has not left
  std::optional<ChunkId> chunk_;  ///< once it has
  /// Handed out, and held by somebody perhaps.
  c10::weak_intrusive_ptr<c10::StorageImpl> opened_;
};

}  // namespace terrace
