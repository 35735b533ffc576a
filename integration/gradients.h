/// Gradients as managed tensors: a defined `p.grad` is a run of the gradient chunk.
///
/// Before AccumulateGrad runs, what is accumulated so far is set aside; after it, the new part is added to
/// it in place, or copied into the managed run if it is the first. Where one of its ops fails, what was set aside is
/// put back. Only `p.grad` says whether there is a gradient: no reference is kept here, so when the program drops a
/// gradient its storage dies, and when all of a chunk's have died the chunk is discarded without a transfer.
///
/// A gradient that itself requires grad (create_graph) is left alone, and so is one that the program has set and can
/// see otherwise too: a tensor that it holds, a view, one of another type. The update reads a copy of those.
/// Post-accumulate hooks that were there run after ours. Sparse gradients throw LogicError.
///
/// Threads: the hooks run on whichever thread LibTorch runs them, several at once, and take the program mutex (see
/// SessionState) where they change what is known of a parameter. `watch`, `adopt_unless_seen`, `for_update` and
/// `make_ordinary` are called under it. `notice_dead_storages` never takes it: whoever is waited for under it calls
/// that.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <torch/csrc/autograd/function.h>

#include "integration/managed_parameter.h"
#include "memory/access_stream.h"

namespace terrace {

class Gradients : public std::enable_shared_from_this<Gradients> {
 public:
  /// `program_mutex` outlives what calls in here but for hooks, which look at `closed` first.
  Gradients(AccessStream& stream, std::shared_ptr<StorageRegistry> registry, std::recursive_mutex& program_mutex);

  /// Hooks the parameter's gradient accumulator, a second time if it has another one now. `parameter` outlives its
  /// accumulator and its tensor.
  void watch(ManagedParameter& parameter);

  /// Has what a hook of the program, added to the accumulator since, does before a gradient is added see what is
  /// accumulated: ours, which sets that aside, comes last again. Not while a backward runs.
  static void hook_last(const ManagedParameter& parameter);

  /// Moves an ordinary gradient of the parameter, set by whatever route, into its managed run, unless it is one to
  /// leave alone.
  void adopt_unless_seen(ManagedParameter& parameter);

  /// Throws LogicError, by the parameter's name, for a gradient of another shape than it or a sparse one.
  static void require_fits(const ManagedParameter& parameter, const at::Tensor& gradient);

  /// Throws ConfigError, by the parameter's name, where its program has asked LibTorch for gradients of another type
  /// than its own and the one that they are `summed_up` in.
  static void require_type_asked_for(const ManagedParameter& parameter, at::ScalarType summed_up);

  /// The parameter's gradient as the update reads it, in its managed run: adopted, or where it is left alone copied
  /// there. To be kept until the update is done. The gradient must be defined.
  at::Tensor for_update(ManagedParameter& parameter);

  /// Tells residency of gradients, and spilled storages, that died since the last call. Any thread.
  void notice_dead_storages() {
    if (registry_->any_gone.load(std::memory_order_acquire)) tell_of_dead_storages();
  }

  /// Gives a managed storage ordinary memory with its bytes. Nothing if it has died. Throws LogicError if it is
  /// gathered.
  void make_ordinary(ManagedStorage& storage);

  /// An op of this thread is over. Where it was one of AccumulateGrad's own and has thrown, as where it finds no room,
  /// the hook that would put back what was set aside does not run any more.
  static void after_op() noexcept {
    if (parking_.accumulator != nullptr) put_back_if_thrown();
  }

  /// Hooks that outlive the session call through from now on.
  void close() noexcept { closed_.store(true, std::memory_order_release); }
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

 private:
  class Park;
  class Restore;

  static void put_back_if_thrown();
  /// Puts our post-accumulate hook before the one that is there, unless that is ours.
  void hook_restore(ManagedParameter& parameter);
  void tell_of_dead_storages();
  /// A managed storage died. Parameters' are ignored.
  void on_storage_death(const ManagedStorage& storage);
  /// Moves an ordinary gradient into the managed run. No gradient, or a managed one: does nothing.
  void adopt(ManagedParameter& parameter);
  /// A gradient in the managed run, with nothing in it yet.
  at::Tensor make(ManagedParameter& parameter);
  void accumulate(ManagedParameter& parameter, at::Tensor parked);

  /// Of this thread, between the two hooks; or stale, where the second was never reached.
  struct Parking {
    const torch::autograd::Node* accumulator;
    int exceptions;  ///< that were under way before
  };
  static inline constinit thread_local Parking parking_{nullptr, 0};

  AccessStream& stream_;
  const std::shared_ptr<StorageRegistry> registry_;
  std::recursive_mutex& program_mutex_;
  std::mutex alive_mutex_;                            ///< taken before the AccessStream's, and with no other
  std::unordered_map<ChunkId, std::uint32_t> alive_;  ///< storages alive by gradient chunk
  std::atomic<bool> closed_{false};
};

}  // namespace terrace
