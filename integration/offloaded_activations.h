/// Activations that leave the device: what autograd has saved for backward rests on the host or on NVMe, and comes back
/// when backward asks for it.
///
/// A storage that is saved leaves once the program holds it no more, between two of its thread's ops: its bytes become
/// a chunk of kind `activation`, which leaves the device where room is wanted, is written to its home ahead of that
/// where the last pass had to do so, and comes back in the order that the last pass had. A tensor that backward is
/// given lies in the chunk itself, which stays on the device for as long as anybody holds that tensor. Saved twice, or
/// through views, a storage leaves once. What is small, under management already, or not plain memory of the program's
/// is kept where it is.
///
/// Where the CPU computes, the program's memory itself becomes the chunk's place on the device; elsewhere its bytes are
/// copied there. A chunk ends with the last graph that holds it. The next pass gives its id to another of its size, the
/// lowest first, so that a program that repeats itself is expected. What finds no room to rest stays on the device; the
/// first time a warning says so.
///
/// As in torch.autograd.graph.save_on_cpu, but for who decides when bytes move. Thread-safe, but for `close`. Order of
/// mutexes: an activation's; the one here; those of the AccessStream.
#pragma once

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

namespace terrace {

class OffloadedActivation;

class OffloadedActivations final : public SavedTensorSource, public std::enable_shared_from_this<OffloadedActivations> {
 public:
  /// `home` is the host or NVMe. `failed` hears why something could not leave, or come back, until `close`.
  OffloadedActivations(SessionMemory& memory, Tier home, std::function<void(std::exception_ptr)> failed);
  ~OffloadedActivations() override;
  OffloadedActivations(const OffloadedActivations&) = delete;
  OffloadedActivations& operator=(const OffloadedActivations&) = delete;

  /// Sends what all threads save here, but where a thread has a source of its own. Until `close`.
  void open();
  /// Brings back what has left, as far as the machine's memory holds it; the rest throws when it is asked for. No op
  /// runs any more.
  void close() noexcept;

  /// An op begins on the calling thread: what the thread has saved, and nobody holds any more, leaves.
  static void before_op() noexcept;

  // SavedTensorSource
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

 private:
  friend class OffloadedActivation;

  /// Whether the tensor is one that can leave, or part of one that has left.
  bool is_wanted(const at::Tensor& tensor) const;
  /// That of the tensor's storage, which is new if it was not saved before.
  std::shared_ptr<OffloadedActivation> activation_of(const at::Tensor& tensor);
  /// The storage is no longer here.
  void forget(const c10::StorageImpl* storage, const OffloadedActivation* activation) noexcept;
  /// A new chunk of so many bytes. Throws OutOfMemory or IoError if it cannot rest.
  ChunkId take_chunk(std::uint64_t bytes);
  void give_back_chunk(ChunkId chunk, std::uint64_t bytes) noexcept;
  /// What such a chunk takes on the device, so that a block of the program's can be it.
  std::uint64_t room_bytes(std::uint64_t bytes) const;
  void stays(std::exception_ptr error) noexcept;

  class Hooks;

  SessionMemory* memory_;  ///< null once closed
  const c10::Device device_;
  const Tier home_;
  const std::uint64_t smallest_bytes_;
  const std::function<void(std::exception_ptr)> failed_;

  std::mutex mutex_;
  /// Of saved storages that have not left, whose address is theirs for so long.
  std::unordered_map<const c10::StorageImpl*, std::pair<const OffloadedActivation*, std::weak_ptr<OffloadedActivation>>>
      here_;
  std::unordered_map<ChunkId, std::weak_ptr<OffloadedActivation>> away_;
  std::map<std::uint64_t, std::set<ChunkId>> gone_;  ///< ids of chunks that were removed, by bytes
  bool has_warned_ = false;
};

}  // namespace terrace
