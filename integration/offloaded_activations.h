/// Activations that leave the device: what autograd has saved for backward rests on the host or on NVMe, and comes back
/// when backward asks for it.
///
/// A storage that is saved leaves once the program holds it no more, between two of its thread's ops, but not while a
/// backward runs that may want it; and where somebody finds no room on the device otherwise, at once. Its bytes become
/// a chunk of kind `activation`, which leaves the device where room is wanted, is written to its home ahead of that
/// where the last pass had to do so, and comes back in the order that the last pass had. A tensor that backward is
/// given lies in the chunk itself, which stays on the device for as long as anybody holds that tensor. Saved twice, or
/// through views, a storage leaves once. What is small, under management already, or not plain memory of the program's
/// is kept where it is.
///
/// Where the CPU computes, the program's memory itself becomes the chunk's place on the device; elsewhere its bytes are
/// copied there. A chunk ends with the last graph that holds it. The next pass gives its id to another of its size, the
/// lowest first, so that a program that repeats itself is expected. What finds no room to rest stays on the device; the
/// first time the log says so.
///
/// As in torch.autograd.graph.save_on_cpu, but for who decides when bytes move. Thread-safe, but for `close`. Order of
/// mutexes: an activation's; the one here; those of the AccessStream.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <c10/core/Storage.h>

#include "integration/saved_tensors.h"
#include "integration/session_memory.h"
#include "memory/access_stream.h"

namespace terrace {

class OffloadedActivation;

class OffloadedActivations final : public SavedTensorSource,
                                   public SpareRoom,
                                   public std::enable_shared_from_this<OffloadedActivations> {
 public:
  /// What is smaller is not worth a chunk; and the emulated device counts it in other units than chunks.
  static constexpr std::uint64_t smallest_that_leaves = 64 * 1024;

  /// `home` is the host or NVMe. `is_asked_for`: the program wants all to rest there, so that it is an error if
  /// something has no room. `failed` hears of errors, until `close`.
  OffloadedActivations(SessionMemory& memory, Tier home, bool is_asked_for,
                       std::function<void(std::exception_ptr)> failed);
  ~OffloadedActivations() override;
  OffloadedActivations(const OffloadedActivations&) = delete;
  OffloadedActivations& operator=(const OffloadedActivations&) = delete;

  /// Sends what all threads save here, but where a thread has a source of its own. Until `close`.
  void open();
  /// Brings back what has left, as far as the machine's memory holds it; the rest throws when it is asked for. No op
  /// runs any more.
  void close() noexcept;

  /// So much of the host's memory is for chunks that rest there and for updates: activations leave that room free.
  void keep_from_host(std::uint64_t bytes) noexcept { kept_from_host_ = bytes; }

  /// An op begins on the calling thread: what the thread has saved, and nobody holds any more, leaves. Of much that is
  /// held it looks at some each time.
  static void before_op() noexcept {
    if (has_pending_) {
      some_leave();
    }
  }

  // SavedTensorSource
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

  // SpareRoom
  /// All leaves that any thread has saved and nobody holds.
  bool give_back() noexcept override;

 private:
  friend class OffloadedActivation;

  static void some_leave() noexcept;
  /// Whether the tensor is one that can leave, or part of one that has left.
  bool is_wanted(const at::Tensor& tensor) const;
  /// That of the tensor's storage, which is new if it was not saved before.
  std::shared_ptr<OffloadedActivation> activation_of(const at::Tensor& tensor);
  /// The storage is no longer here.
  void forget(const c10::StorageImpl* storage, const OffloadedActivation* activation) noexcept;
  /// False where others may need the room that it would rest in; throws OutOfMemory where the program has asked that it
  /// rests there all the same.
  bool may_leave(std::uint64_t bytes) const;
  /// A new chunk of so many bytes. Throws OutOfMemory or IoError if it cannot rest.
  ChunkId take_chunk(std::uint64_t bytes);
  void give_back_chunk(ChunkId chunk, std::uint64_t bytes) noexcept;
  /// What such a chunk takes on the device, so that a block of the program's can be it.
  std::uint64_t room_bytes(std::uint64_t bytes) const;
  void stays(std::exception_ptr error) noexcept;

  class Hooks;

  /// The calling thread has saved what may still have to leave. Apart from the list of it, whose every use looks for
  /// its destructor.
  static inline constinit thread_local bool has_pending_ = false;

  SessionMemory* memory_;  ///< null once closed
  const c10::Device device_;
  const Tier home_;
  const bool is_asked_for_;
  const std::uint64_t smallest_bytes_;
  std::atomic<std::uint64_t> kept_from_host_{0};
  const std::function<void(std::exception_ptr)> failed_;

  std::mutex mutex_;
  /// Of saved storages that have not left, whose address is theirs for so long.
  std::unordered_map<const c10::StorageImpl*, std::pair<const OffloadedActivation*, std::weak_ptr<OffloadedActivation>>>
      here_;
  std::unordered_map<ChunkId, std::weak_ptr<OffloadedActivation>> away_;
  std::map<std::uint64_t, std::set<ChunkId>> gone_;  ///< ids of chunks that were removed, by bytes
  bool has_said_so_ = false;
};

}  // namespace terrace
