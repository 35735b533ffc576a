#include "integration/recomputed_block.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "base/error.h"
#include "integration/managed_storage.h"

namespace terrace {
namespace {

/// A cast that is cached would outlive the recompute, and be found after the parameter has changed.
class AutocastCacheOff {
 public:
  AutocastCacheOff() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastCacheOff() { at::autocast::set_autocast_cache_enabled(before_); }
  AutocastCacheOff(const AutocastCacheOff&) = delete;
  AutocastCacheOff& operator=(const AutocastCacheOff&) = delete;

 private:
  const bool before_;
};

/// Whoever has the generators stand where they do not belong for a while. Taken before a block's mutex, and recursive,
/// for a block's function may run backward through another block.
std::recursive_mutex generators_elsewhere;

[[noreturn]] void fail_as_not_deterministic(const std::string& difference) {
  throw LogicError("block: the function did not do the same when it was run again for backward: " + difference,
                   "a block's function must be deterministic: it may depend only on its inputs, its parameters and "
                   "LibTorch's default generator; or set placement.activations = \"keep\"");
}

}  // namespace

/// Stands where the first run saved a tensor.
class RecomputedBlock::Dropped final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Dropped(std::shared_ptr<RecomputedBlock> block) : block_(std::move(block)) {}
  void call_pack_hook(const at::Tensor& tensor) override { index_ = block_->drop(tensor); }
  at::Tensor call_unpack_hook() override { return block_->unpack(index_); }

 private:
  const std::shared_ptr<RecomputedBlock> block_;
  std::size_t index_ = 0;
};

/// Gathers what a later run saves, and compares it with what the first one did.
class RecomputedBlock::Collector final : public SavedTensorSource {
 public:
  explicit Collector(const std::vector<TensorRecord>& at_first) : at_first_(at_first) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Kept>(*this); }

  std::vector<std::shared_ptr<const KeptTensor>> tensors;
  std::string difference;  ///< the first

 private:
  class Kept final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Kept(Collector& collector) : collector_(collector) {}
    void call_pack_hook(const at::Tensor& tensor) override { kept_ = collector_.keep(tensor); }
    at::Tensor call_unpack_hook() override { return kept_->get(); }  // by a backward within the block's function

   private:
    Collector& collector_;  // packing happens during the run
    std::shared_ptr<const KeptTensor> kept_;
  };

  std::shared_ptr<const KeptTensor> keep(const at::Tensor& tensor) {
    const std::size_t index = tensors.size();
    if (difference.empty() && index < at_first_.size() && !at_first_[index].matches(tensor)) {
      difference = "saved tensor " + std::to_string(index) + " is a " + describe(tensor) + ", and was a " +
                   at_first_[index].description() + " at first";
    }
    return tensors.emplace_back(std::make_shared<const KeptTensor>(tensor));
  }

  const std::vector<TensorRecord>& at_first_;
};

/// While a block runs again, perhaps for a backward within the first run of another, what it does is recorded by none;
/// by itself, where its own first run is not over.
class RecomputedBlock::Recorder {
 public:
  explicit Recorder(RecomputedBlock* block) : outer_(std::exchange(recording_, block)) {}
  ~Recorder() { recording_ = outer_; }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

 private:
  RecomputedBlock* const outer_;
};

RecomputedBlock::Recording::Recording(RecomputedBlock& block) noexcept : block_(block), scope_(block) {
  recording_ = &block;
}

RecomputedBlock::Recording::~Recording() {
  recording_ = nullptr;  // a block within a block does not record
  block_.generator_after_ = GeneratorState::now();
}

RecomputedBlock::RecomputedBlock() = default;

const at::Tensor& RecomputedBlock::placeholder() {
  static const at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), c10::Device(c10::kCPU));
  return tensor;
}

void RecomputedBlock::depends_on(const at::Tensor& tensor) {
  read_.emplace_back(tensor);
  if (ManagedStorage* const storage = ManagedStorage::of(tensor)) {
    to_read_.push_back(storage->expect_reading());
  }
}

void RecomputedBlock::depends_on_parameter(const at::Tensor& parameter) {
  const auto* impl = parameter.unsafeGetTensorImpl();
  if (std::find(parameters_.begin(), parameters_.end(), impl) == parameters_.end()) {
    parameters_.push_back(impl);
    depends_on(parameter);
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> RecomputedBlock::hooks() {
  return std::make_unique<Dropped>(shared_from_this());
}

std::size_t RecomputedBlock::drop(const at::Tensor& tensor) {
  saved_.emplace_back(tensor);
  return saved_.size() - 1;
}

at::Tensor RecomputedBlock::unpack(std::size_t index) {
  saved_[index].check_unchanged();
  std::unique_lock lock(mutex_);
  if (is_wanting(index)) {
    lock.unlock();
    const std::unique_lock generators =
        draws() ? std::unique_lock(generators_elsewhere) : std::unique_lock(generators_elsewhere, std::defer_lock);
    lock.lock();
    if (is_wanting(index)) {  // no other thread has made it meanwhile
      recompute();
      forget_when_backward_ends();
    }
  }
  const std::shared_ptr<const KeptTensor> kept = std::exchange(again_[index], nullptr);
  lock.unlock();
  return kept->get();
}

void RecomputedBlock::recompute() {
  again_.clear();
  Collector collector(saved_);
  {
    const at::ThreadLocalStateGuard thread_state(thread_state_);
    const AutocastCacheOff no_cache;
    const BufferScope buffers(buffers_);
    const Recorder recorder(generator_after_ ? nullptr : this);
    for (const TensorRecord& record : read_) {
      record.check_unchanged();  // buffers that the block itself has written are as it read them
    }
    const SavedTensorScope scope(collector);
    run_with_generators_of_the_first_run();
  }
  check_same(collector);
  again_ = std::move(collector.tensors);
  to_read_.clear();
}

void RecomputedBlock::run_with_generators_of_the_first_run() const {
  if (!draws()) {
    run_again();
    return;
  }
  const GeneratorScope generator(generator_);
  run_again();
  if (generator_after_ && !(GeneratorState::now() == *generator_after_)) {
    fail_as_not_deterministic(
        "it drew other random numbers, or another thread drew from LibTorch's default generator while it ran");
  }
}

void RecomputedBlock::check_same(const Collector& again) const {
  // A backward within the function asks during the first run for what was saved so far.
  const std::size_t count = again.tensors.size();
  if (generator_after_ ? count != saved_.size() : count < saved_.size()) {
    fail_as_not_deterministic("it saved " + std::to_string(count) + " tensors, and " + std::to_string(saved_.size()) +
                              " at first");
  }
  if (!again.difference.empty()) {
    fail_as_not_deterministic(again.difference);
  }
}

/// A backward that leaves out part of the graph does not ask for all.
void RecomputedBlock::forget_when_backward_ends() {
  if (torch::autograd::get_current_graph_task_id() == -1) {
    return;  // asked for outside of a backward
  }
  /// LibTorch calls what is queued only where backward succeeds, but lets go of it either way.
  struct AtTheEnd {
    explicit AtTheEnd(std::weak_ptr<RecomputedBlock> of) : block(std::move(of)) {}
    ~AtTheEnd() {
      if (const auto lives = block.lock()) {
        const std::scoped_lock lock(lives->mutex_);
        lives->again_.clear();
      }
    }
    AtTheEnd(const AtTheEnd&) = delete;
    AtTheEnd& operator=(const AtTheEnd&) = delete;
    const std::weak_ptr<RecomputedBlock> block;
  };
  torch::autograd::Engine::get_default_engine().queue_callback(
      [kept = std::make_shared<AtTheEnd>(weak_from_this())] { (void)kept; });
}

}  // namespace terrace
