#include "integration/interceptor.h"

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "integration/buffer_snapshots.h"
#include "integration/gradients.h"
#include "integration/no_fallback.h"
#include "integration/offloaded_activations.h"
#include "integration/pause.h"
#include "integration/recomputed_block.h"
#include "integration/spillable_storages.h"
#include "integration/storages_of.h"
#include "integration/thread_owned.h"
#include "memory/current_op.h"

namespace terrace {
namespace {

std::atomic<OpPinner*> attached{nullptr};

/// What of an op matters here.
struct OpTraits {
  bool touches_bytes = false;
  std::vector<bool> writes;  // by argument

  bool writes_to(std::size_t argument) const { return argument < writes.size() && writes[argument]; }
};

bool writes_through(const c10::AliasInfo* alias) {
  if (alias == nullptr) {
    return false;
  }
  if (alias->isWrite()) {
    return true;
  }
  for (const c10::AliasInfo& contained : alias->containedTypes()) {
    if (writes_through(&contained)) {
      return true;
    }
  }
  return false;
}

/// Made of ops, and yet reads by pointer what may be a parameter. Not those to which a whole network's are given.
bool reads_beside_its_ops(const c10::FunctionSchema& op) {
  return op.name() == "aten::max_pool1d" || op.name() == "aten::ctc_loss" || op.name().starts_with("aten::fbgemm_") ||
         (op.name() == "aten::tensor_split" && op.overload_name() == "tensor_indices_or_sections");
}

/// Running statistics change where a batch is normalized in training, though the schema does not say so. Which it is
/// only the call knows.
bool writes_unsaid(const std::string& op, const std::string& argument) {
  const auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  return argument.starts_with("running_") && has("batch_norm") && !has("backward") && !has("no_training") &&
         !has("no_update");
}

OpTraits traits_of(const c10::OperatorHandle& op) {
  OpTraits traits;
  const std::string& name = op.schema().name();
  const bool reads_by_pointer = reads_beside_its_ops(op.schema());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
      !reads_by_pointer) {
    return traits;
  }
  // What changes a tensor's shape or graph in place leaves its bytes alone (zero_grad calls detach_), unless it
  // resizes, or replaces the storage, where LibTorch looks at the one before.
  if (op.hasTag(at::Tag::inplace_view) && !name.starts_with("aten::resize") && !name.starts_with("aten::set_")) {
    return traits;
  }
  for (const c10::Argument& result : op.schema().returns()) {
    if (result.alias_info() != nullptr && !writes_through(result.alias_info()) && !reads_by_pointer) {
      return traits;  // a view
    }
  }
  traits.touches_bytes = true;
  for (const c10::Argument& argument : op.schema().arguments()) {
    traits.writes.push_back(writes_through(argument.alias_info()) || writes_unsaid(name, argument.name()));
  }
  return traits;
}

/// How often LibTorch has forgotten an op, as it does when the library goes that registered it.
std::atomic<std::uint64_t> ops_forgotten{0};

class OpsForgotten final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& /*op*/) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override { ++ops_forgotten; }
};

/// The ops that a thread has seen. The key is the address of an op's name, which stays where it is until LibTorch
/// forgets one.
class KnownOps {
 public:
  /// The calling thread's; once that is gone, one that stays.
  static KnownOps& of_this_thread() {
    if (KnownOps* const known = ThreadOwned<KnownOps>::get()) {
      return *known;
    }
    static constinit thread_local KnownOps* late = nullptr;
    if (late == nullptr) {
      late = new KnownOps;
    }
    return *late;
  }

  /// The traits of the op that runs, or null for what is not an op.
  const OpTraits* find(const at::RecordFunction& function) {
    if (const std::uint64_t forgotten = ops_forgotten.load(std::memory_order_acquire); forgotten != since_) {
      ops_.clear();
      since_ = forgotten;
    }
    const void* key = function.name();
    if (const auto found = ops_.find(key); found != ops_.end()) {
      return found->second;
    }
    const auto name = function.operator_name();
    if (!name) {
      return nullptr;
    }
    const auto op = c10::Dispatcher::singleton().findOp(*name);
    if (!op) {
      return nullptr;
    }
    return ops_.emplace(key, &kept_.emplace_back(traits_of(*op))).first->second;
  }

 private:
  ska::flat_hash_map<const void*, const OpTraits*> ops_;
  std::deque<OpTraits> kept_;  // for an op within an op may come by here while the outer's are in use
  std::uint64_t since_ = 0;
};

using Operands = c10::SmallVector<OpOperand, 8>;

/// Tells the block that runs for the first time of the buffers that an op may write.
void note_written_buffers(c10::ArrayRef<const c10::IValue> inputs, const OpTraits& traits, RecomputedBlock& block) {
  const auto note = [&](const at::Tensor& written) {
    if (is_managed_buffer(written)) {
      block.buffers().before_write(written);
    }
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (traits.writes_to(i) && inputs[i].isTensor()) {
      note(inputs[i].toTensor());
    } else if (traits.writes_to(i) && inputs[i].isTensorList()) {
      for (const at::Tensor& each : inputs[i].toTensorVector()) {
        note(each);
      }
    }
  }
}

std::unique_ptr<at::ObserverContext> pin_operands(OpPinner& pinner, c10::ArrayRef<const c10::IValue> inputs,
                                                  const OpTraits& traits) {
  Operands found;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    visit_storages(inputs[i], [&](c10::StorageImpl& storage) {
      if (ManagedStorage* const managed = ManagedStorage::of(storage)) {
        found.push_back({managed, traits.writes_to(i)});
      }
    });
  }
  return found.empty() ? nullptr : pinner.pin({found.data(), found.size()}, inputs);
}

/// For an op that touches bytes.
std::unique_ptr<at::ObserverContext> prepare(OpPinner& pinner, const at::RecordFunction& function,
                                             const OpTraits& traits) {
  const auto inputs = function.inputs();
  if (RecomputedBlock* const block = RecomputedBlock::recording()) {
    note_written_buffers(inputs, traits, *block);
  }
  return pin_operands(pinner, inputs, traits);
}

std::unique_ptr<at::ObserverContext> before_op(const at::RecordFunction& function) {
  OpPinner* pinner = attached.load(std::memory_order_acquire);
  if (pinner == nullptr || Pause::active()) {
    CurrentOp::enter("");
    NoFallback::enter(/*is_op=*/false);
    return nullptr;
  }
  OffloadedActivations::before_op();
  const OpTraits* const traits = KnownOps::of_this_thread().find(function);
  CurrentOp::enter(traits != nullptr ? function.name() : CurrentOp::name());  // other names need not live
  NoFallback::enter(/*is_op=*/traits != nullptr);
  const bool touches_bytes = traits != nullptr && traits->touches_bytes;
  if (SpillableStorages* const storages = SpillableStorages::active()) {
    auto frame = storages->begin_op(function.inputs(), touches_bytes);
    if (touches_bytes) {
      frame->pins = prepare(*pinner, function, *traits);
    }
    return frame;
  }
  return touches_bytes ? prepare(*pinner, function, *traits) : nullptr;
}

void after_op(const at::RecordFunction&, at::ObserverContext*) {
  CurrentOp::leave();
  NoFallback::leave();
  Gradients::after_op();
}

at::CallbackHandle installed_callback() {
  static const at::CallbackHandle installed = at::addGlobalCallback(
      at::RecordFunctionCallback(&before_op, &after_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  return installed;
}

}  // namespace

void attach_interceptor(OpPinner& pinner) {
  // For good: LibTorch forgets its own ops when the program ends.
  static const auto* const listening = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<OpsForgotten>()));
  (void)listening;
  installed_callback();
  attached.store(&pinner, std::memory_order_release);
}

void detach_interceptor() noexcept { attached.store(nullptr, std::memory_order_release); }

InterceptionOff::InterceptionOff() { at::disableCallback(installed_callback()); }
InterceptionOff::~InterceptionOff() { at::reenableCallback(installed_callback()); }

}  // namespace terrace
