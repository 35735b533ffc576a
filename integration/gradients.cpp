#include "integration/gradients.h"

#include <algorithm>
#include <array>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "base/error.h"
#include "integration/byte_copies.h"
#include "integration/element_types.h"

namespace terrace {

namespace autograd = torch::autograd;

/// What a parameter's two hooks share: the gradient set aside between them, which run on one thread. Under the program
/// mutex.
struct ParkedGradient {
  /// What a backward of this thread that failed has left is stale.
  void put(at::Tensor gradient) {
    take();
    if (gradient.defined()) {
      by_thread.emplace_back(std::this_thread::get_id(), std::move(gradient));
    }
  }

  at::Tensor take() {
    const auto found = std::find_if(by_thread.begin(), by_thread.end(),
                                    [](const auto& each) { return each.first == std::this_thread::get_id(); });
    if (found == by_thread.end()) {
      return {};
    }
    at::Tensor gradient = std::move(found->second);
    by_thread.erase(found);
    return gradient;
  }

  std::vector<std::pair<std::thread::id, at::Tensor>> by_thread;  ///< one, but where threads train one parameter
  const void* park = nullptr;                                     ///< the hook that sets it aside
  const void* restore = nullptr;                                  ///< and the one that puts it back
};

namespace {

/// LibTorch holds it while it adds to a leaf's gradient, but not around hooks.
struct NodeMutex : autograd::Node {
  static std::mutex& of(autograd::Node& node) { return node.*(&NodeMutex::mutex_); }
};

bool is_in_its_run(const ManagedParameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  const ManagedStorage* const managed = ManagedStorage::of(gradient);
  return managed != nullptr && managed == parameter.gradient.lock().get() && gradient.storage_offset() == 0 &&
         gradient.strides() == parameter.tensor.strides() && gradient.scalar_type() == parameter.gradient_type &&
         !gradient.is_neg();
}

/// Whether the program would notice that the gradient has become another tensor, of the type that is summed up.
bool is_seen_otherwise(const at::Tensor& gradient, at::ScalarType summed_up) {
  return gradient.scalar_type() != summed_up || gradient.use_count() > 1 ||
         (gradient.has_storage() && gradient.storage().use_count() > 1);
}

}  // namespace

/// Before AccumulateGrad: sets aside what is accumulated, so that it sees none.
class Gradients::Park : public autograd::FunctionPreHook {
 public:
  Park(std::weak_ptr<Gradients> owner, autograd::Node& accumulator, ManagedParameter& parameter)
      : owner_(std::move(owner)), accumulator_(accumulator), parameter_(parameter), parked_(parameter.parked) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const auto owner = owner_.lock();
    if (!owner || owner->closed()) {
      return gradients;
    }
    const std::scoped_lock accumulating(NodeMutex::of(accumulator_));  // another thread may be
    const std::scoped_lock lock(owner->program_mutex_);
    require_type_asked_for(parameter_, parameter_.gradient_type);  // the program may have asked for another since,
    owner->hook_restore(parameter_);                               // and set a hook of its own
    parked_->put(std::exchange(parameter_.tensor.mutable_grad(), {}));
    parking_ = {&accumulator_, std::uncaught_exceptions()};
    return gradients;
  }

  /// Under the accumulator's mutex, which AccumulateGrad holds around its ops.
  void put_back() const {
    const auto owner = owner_.lock();
    if (!owner || owner->closed()) {
      return;
    }
    const std::scoped_lock lock(owner->program_mutex_);
    at::Tensor& gradient = parameter_.tensor.mutable_grad();
    if (!gradient.defined()) {  // no other thread's is there by now
      gradient = parked_->take();
    }
  }

 private:
  const std::weak_ptr<Gradients> owner_;
  autograd::Node& accumulator_;  // owns this hook
  ManagedParameter& parameter_;
  const std::shared_ptr<ParkedGradient> parked_;
};

/// After it: puts the sum back, in the managed run.
class Gradients::Restore : public autograd::PostAccumulateGradHook {
 public:
  Restore(std::weak_ptr<Gradients> owner, ManagedParameter& parameter,
          std::unique_ptr<autograd::PostAccumulateGradHook> next)
      : owner_(std::move(owner)), parameter_(parameter), parked_(parameter.parked), next_(std::move(next)) {}

  void operator()(const autograd::Variable& variable) override {
    parking_.accumulator = nullptr;
    const auto owner = owner_.lock();
    if (owner && !owner->closed()) {
      const auto accumulator = parameter_.accumulator.lock();
      std::unique_lock<std::mutex> accumulating;
      if (accumulator) {
        accumulating = std::unique_lock(NodeMutex::of(*accumulator));
      }
      const std::scoped_lock lock(owner->program_mutex_);
      owner->accumulate(parameter_, parked_->take());
    }
    if (next_) {  // it may wait for other threads
      (*next_)(variable);
    }
    if (owner && !owner->closed()) {
      const std::scoped_lock lock(owner->program_mutex_);
      if (parameter_.after_accumulation) {
        parameter_.after_accumulation();
      }
    }
  }

 private:
  const std::weak_ptr<Gradients> owner_;
  ManagedParameter& parameter_;
  const std::shared_ptr<ParkedGradient> parked_;
  const std::unique_ptr<autograd::PostAccumulateGradHook> next_;
};

void Gradients::put_back_if_thrown() {
  if (std::uncaught_exceptions() <= parking_.exceptions) {
    return;
  }
  const autograd::Node* const accumulator = std::exchange(parking_.accumulator, nullptr);
  const auto running = autograd::get_current_node();
  if (running.get() != accumulator) {
    return;
  }
  for (const auto& hook : running->pre_hooks()) {
    if (const auto* const park = dynamic_cast<const Park*>(hook.get())) {
      park->put_back();
    }
  }
}

Gradients::Gradients(AccessStream& stream, std::shared_ptr<StorageRegistry> registry,
                     std::recursive_mutex& program_mutex)
    : stream_(stream), registry_(std::move(registry)), program_mutex_(program_mutex) {}

void Gradients::watch(ManagedParameter& parameter) {
  if (!parameter.parked) {
    parameter.parked = std::make_shared<ParkedGradient>();
  }
  auto known = parameter.accumulator.lock();
  if (known && !known->input_metadata(0).is_same_shape(parameter.tensor)) {
    // A graph holds it still: LibTorch would take it for the other shape too.
    autograd::impl::set_grad_accumulator(parameter.tensor, {});
    known.reset();
  }
  // Where it is frozen meanwhile it has none to ask for; what a graph holds still comes back with its gradients.
  const auto accumulator =
      parameter.tensor.requires_grad() ? autograd::impl::grad_accumulator(parameter.tensor) : known;
  if (accumulator != known) {
    parameter.accumulator = accumulator;
    auto park = std::make_unique<Park>(weak_from_this(), *accumulator, parameter);
    parameter.parked->park = park.get();
    accumulator->add_pre_hook(std::move(park));
  }
  parameter.storage->keep(accumulator);
  hook_restore(parameter);
}

void Gradients::hook_last(const ManagedParameter& parameter) {
  const auto accumulator = parameter.accumulator.lock();
  if (accumulator == nullptr) {
    return;
  }
  auto& hooks = accumulator->pre_hooks();
  const auto is_ours = [&](const auto& hook) { return hook.get() == parameter.parked->park; };
  if (const auto ours = std::find_if(hooks.begin(), hooks.end(), is_ours); ours != hooks.end()) {
    std::rotate(ours, ours + 1, hooks.end());
  }
}

void Gradients::hook_restore(ManagedParameter& parameter) {
  if (autograd::impl::post_acc_grad_hooks(parameter.tensor).get() == parameter.parked->restore &&
      parameter.parked->restore != nullptr) {
    return;
  }
  auto next = std::move(autograd::impl::post_acc_grad_hooks(parameter.tensor));
  auto restore = std::make_unique<Restore>(weak_from_this(), parameter, std::move(next));
  parameter.parked->restore = restore.get();
  autograd::impl::set_post_acc_grad_hooks(parameter.tensor, std::move(restore));
}

void Gradients::require_fits(const ManagedParameter& parameter, const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) {
    throw LogicError("parameter '" + parameter.name + "' has a sparse gradient, which cannot be managed",
                     "make the embedding's gradient dense (sparse(false))");
  }
  if (gradient.sizes() != parameter.tensor.sizes()) {
    throw LogicError(c10::str("parameter '", parameter.name, "', of shape ", parameter.tensor.sizes(),
                              ", has a gradient of shape ", gradient.sizes()),
                     "give it one of its own shape");
  }
  if (gradient.scalar_type() != parameter.tensor.scalar_type() && !at::isFloatingType(gradient.scalar_type())) {
    throw LogicError(c10::str("parameter '", parameter.name, "', of ", parameter.tensor.scalar_type(),
                              ", has a gradient of ", gradient.scalar_type()),
                     "give it one of a floating-point type, which is converted");
  }
}

void Gradients::require_type_asked_for(const ManagedParameter& parameter, at::ScalarType summed_up) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  const at::ScalarType asked = parameter.tensor.grad_dtype().value_or(own);
  if (asked != own && asked != summed_up) {
    throw ConfigError("parameter '" + parameter.name + "' asks for gradients of " + c10::toString(asked) +
                          " (set_grad_dtype), and the session sums up those of " + c10::toString(summed_up),
                      "set optimizer.accumulate = \"float32\" for bf16 parameters, or ask for no other type");
  }
}

void Gradients::adopt_unless_seen(ManagedParameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  if (gradient.defined() && !is_seen_otherwise(gradient, parameter.gradient_type)) {
    adopt(parameter);
  }
}

void Gradients::adopt(ManagedParameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!gradient.defined() || gradient.requires_grad()) {
    return;
  }
  if (ManagedStorage::of(parameter.tensor) != parameter.storage.get() || !parameter.gradient_chunk) {
    return;  // it has another storage now, perhaps of another shape, or was unfrozen: the next step takes it in
  }
  if (is_in_its_run(parameter)) {
    return;
  }
  if (gradient.layout() != at::kStrided) {
    const at::Tensor sparse = std::exchange(gradient, {});
    require_fits(parameter, sparse);
  }
  require_fits(parameter, gradient);
  const at::NoGradGuard no_grad;
  at::Tensor adopted = make(parameter);
  adopted.copy_(gradient);
  gradient = std::move(adopted);
}

at::Tensor Gradients::for_update(ManagedParameter& parameter) {
  adopt_unless_seen(parameter);
  const at::Tensor& gradient = parameter.tensor.grad();
  if (is_in_its_run(parameter)) {
    return gradient;
  }
  const at::NoGradGuard no_grad;
  at::Tensor copy = make(parameter);
  copy.copy_(gradient);
  return copy;
}

void Gradients::accumulate(ManagedParameter& parameter, at::Tensor parked) {
  ++parameter.accumulations;
  if (parameter.before_accumulation) {
    parameter.before_accumulation();
  }
  // Also where all of a forward was in functions of the program's own, which LibTorch runs without a graph.
  stream_.expect_step();
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!parked.defined()) {
    adopt(parameter);
    return;
  }
  const at::Tensor fresh = std::exchange(gradient, parked);
  if (!fresh.defined()) {
    return;
  }
  if (fresh.requires_grad() || parked.requires_grad()) {
    const at::AutoGradMode with_graph(true);
    gradient = parked + fresh;
    return;
  }
  require_fits(parameter, fresh);
  const at::NoGradGuard no_grad;
  gradient.add_(fresh);
}

at::Tensor Gradients::make(ManagedParameter& parameter) {
  // A queued update reads the gradient before it is written anew, and lets go of it then.
  const std::array will_write{ChunkAccess{parameter.gradient_chunk.value(), Tier::device, Access::write}};
  stream_.settle_prior_work(will_write);
  // A gradient that the program still holds elsewhere keeps its value in memory of its own.
  if (const auto held = parameter.gradient.lock()) {
    make_ordinary(*held);
  }
  const at::Tensor& tensor = parameter.tensor;
  at::Tensor gradient = tensor_without_memory(tensor, parameter.gradient_type, tensor.device());
  const ChunkId chunk = parameter.gradient_chunk.value();
  const auto managed =
      ManagedStorage::attach(storage_of(gradient), chunk, parameter.element_offset * gradient.element_size(),
                             parameter.name + ".grad", registry_);
  parameter.gradient = managed;
  {
    const std::scoped_lock lock(alive_mutex_);
    ++alive_[chunk];
  }
  return gradient;
}

void Gradients::make_ordinary(ManagedStorage& storage) {
  const auto keep = storage.shared_from_this();
  std::size_t bytes = 0;
  c10::Device device = at::kCPU;
  {
    const std::scoped_lock lock(registry_->mutex);
    if (storage.storage() == nullptr) {
      return;
    }
    device = storage.storage()->device();
    if (storage.is_open()) {
      throw LogicError("'" + storage.name() + "' has to give up its place while it is gathered",
                       "end what Session::gather returned first");
    }
    bytes = storage.storage()->nbytes();
  }
  c10::DataPtr data = allocate_like_the_program(device, bytes);
  const std::array accesses{ChunkAccess{storage.chunk(), Tier::device, Access::read}};
  const Pin pin = stream_.acquire(accesses);
  copy_bytes(data.mutable_get(), device, pin.device(0) + storage.offset_bytes(), device, bytes);
  {
    const std::scoped_lock lock(registry_->mutex);
    if (storage.storage() != nullptr) {
      storage.detach(std::move(data));
    }
  }
  on_storage_death(storage);
}

void Gradients::tell_of_dead_storages() {
  std::vector<std::shared_ptr<ManagedStorage>> gone;
  {
    const std::scoped_lock lock(registry_->mutex);
    gone.swap(registry_->gone);
    registry_->any_gone.store(false, std::memory_order_release);
  }
  for (const auto& storage : gone) {
    on_storage_death(*storage);
  }
}

void Gradients::on_storage_death(const ManagedStorage& storage) {
  if (storage.is_spilled()) {
    stream_.remove_chunk(storage.chunk());
    return;
  }
  // Until the chunk is discarded nobody may make another gradient in it: those bytes would be lost.
  const std::scoped_lock lock(alive_mutex_);
  const auto found = alive_.find(storage.chunk());
  if (found == alive_.end() || --found->second > 0) {
    return;
  }
  alive_.erase(found);
  stream_.discard(storage.chunk());
}

}  // namespace terrace
