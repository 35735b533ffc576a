/// One call of a block whose saved tensors are dropped, and made again when backward asks for them.
///
/// Non-reentrant recompute, as in torch.utils.checkpoint with use_reentrant=False: the graph is that of the first
/// run. Where it saved a tensor it holds a hook; the first hook that is unpacked runs the block's function again,
/// with the random generator, buffers, autocast and other thread-local state of the first run, and collects what that
/// run saves, in order, kept as what other ops save is: where the device has no room it leaves until it is asked for.
/// Each tensor is handed out once; what has been handed out and is asked for again, by another backward through a
/// retained graph, is made again. What was not handed out is dropped when the backward ends.
///
/// A tensor that was handed out takes the place of the first one in its graph, so gradients of gradients are right.
///
/// Threads: the first run records on its own thread; hooks may be unpacked on any. The random generators are the
/// process's, so of blocks that draw from them one runs again at a time, and numbers that another thread draws during
/// either run of such a block are found out: its random numbers would be others than at first.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include "integration/buffer_snapshots.h"
#include "integration/generator_state.h"
#include "integration/saved_tensors.h"
#include "integration/tensor_record.h"

namespace terrace {

class RecomputedBlock : public SavedTensorSource, public std::enable_shared_from_this<RecomputedBlock> {
 public:
  /// The block whose first run is under way on this thread, or null.
  static RecomputedBlock* recording() noexcept { return recording_; }

  RecomputedBlock(const RecomputedBlock&) = delete;
  RecomputedBlock& operator=(const RecomputedBlock&) = delete;

  /// A tensor from outside that the first run reads: it must be unchanged when the block runs again.
  void depends_on(const at::Tensor& tensor);
  /// The same for a managed parameter, of which it may hear many times during the first run.
  void depends_on_parameter(const at::Tensor& parameter);

  /// Of the managed buffers that the first run writes.
  BufferSnapshots& buffers() noexcept { return buffers_; }

  // SavedTensorSource, during the first run
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

  /// Around the first run.
  class Recording {
   public:
    explicit Recording(RecomputedBlock& block) noexcept;
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    RecomputedBlock& block_;
    const SavedTensorScope scope_;
  };

 protected:
  RecomputedBlock();

  /// A tensor without bytes, which stands where one was that is kept elsewhere.
  static const at::Tensor& placeholder();

  /// Calls the function on detached inputs and drops what it returns.
  virtual void run_again() const = 0;

 private:
  class Dropped;
  class Collector;
  class Recorder;

  static inline thread_local RecomputedBlock* recording_ = nullptr;

  std::size_t drop(const at::Tensor& tensor);
  at::Tensor unpack(std::size_t index);
  /// Whether the tensor is to be made, or made again. The mutex is held.
  bool is_wanting(std::size_t index) const { return index >= again_.size() || again_[index] == nullptr; }
  /// As far as is known.
  bool draws() const { return !generator_after_ || !(*generator_after_ == generator_); }
  void recompute();
  void run_with_generators_of_the_first_run() const;
  void check_same(const Collector& again) const;
  void forget_when_backward_ends();

  const at::ThreadLocalState thread_state_;
  const GeneratorState generator_ = GeneratorState::now();
  std::optional<GeneratorState> generator_after_;  ///< the first run, once that is over
  BufferSnapshots buffers_;
  std::vector<TensorRecord> read_;
  std::vector<const c10::TensorImpl*> parameters_;    // those in read_
  std::vector<std::shared_ptr<const void>> to_read_;  // until it has run again: ManagedStorage::expect_reading
  std::vector<TensorRecord> saved_;                   // by the first run, in order

  std::mutex mutex_;  // held while the block runs again: others wait for the same tensors
  std::vector<std::shared_ptr<const KeptTensor>> again_;  // as saved_; null where handed out
};

}  // namespace terrace
