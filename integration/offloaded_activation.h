/// One storage that autograd has saved, wherever its bytes are.
///
/// Thread-safe; who asks for it while another thread moves it waits for that.
#pragma once

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
  /// it. False if it may do so later. Throws OutOfMemory or IoError if it has nowhere to rest; then it is where it was.
  bool try_leave();
  /// The same, but where that cannot be it stays for good, and the owner hears why.
  bool try_leave_or_stay() noexcept;
  /// A storage with its bytes on the device, to be read. Throws OutOfMemory, IoError or CorruptData, and LogicError
  /// after the session has ended without it.
  c10::Storage storage();
  /// The session ends: its bytes move to ordinary memory, from which a storage that was handed out has them too. Throws
  /// as `storage` does.
  void become_ordinary();
  /// The session ends without it: to ask for it, or touch a storage that was handed out, throws from now on.
  void end() noexcept;

  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  struct Opened;

  /// Its bytes become those of the chunk: in the memory where they are, or else copied. Throws OutOfMemory where
  /// neither can be now.
  void move_to(ChunkId chunk);

  const std::shared_ptr<OffloadedActivations> owner_;
  const std::uint64_t bytes_;
  std::mutex mutex_;
  c10::Storage storage_;          ///< while it has not left
  std::optional<ChunkId> chunk_;  ///< once it has
  /// Handed out, and held by somebody perhaps.
  c10::weak_intrusive_ptr<c10::StorageImpl> opened_;
};

}  // namespace terrace
