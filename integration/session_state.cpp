#include "integration/session_state.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "integration/element_types.h"
#include "integration/generator_state.h"
#include "integration/no_fallback.h"
#include "integration/recomputed_block.h"
#include "integration/saved_tensors.h"
#include "integration/vector_functions.h"

namespace terrace {
namespace {

/// Where activations rest that leave the device; nothing where they stay there.
std::optional<Tier> home_of_activations(const Config& config, c10::Device program_device) {
  const std::string& placement = config.placement.activations;
  if (placement == "host") return Tier::host;
  if (placement == "nvme") return Tier::nvme;
  // Elsewhere what leaves is copied on the device first, needed or not.
  if (placement == "keep" || !program_device.is_cpu()) return std::nullopt;
  // Space on NVMe costs nobody anything, and on the way there they stay on the host where it has room.
  return config.nvme.paths.empty() ? Tier::host : Tier::nvme;
}

/// Of an op's inputs, those that are not managed; 0 where there are none.
std::uint64_t shapes_of_ordinary_tensors(c10::ArrayRef<const c10::IValue> inputs) {
  std::uint64_t hash = 0;
  for (const c10::IValue& input : inputs) {
    if (input.isTensor() && input.toTensor().defined() && ManagedStorage::of(input.toTensor()) == nullptr) {
      for (const std::int64_t size : input.toTensor().sizes()) {
        hash = c10::hash_combine(hash, static_cast<std::size_t>(size) + 1);
      }
      hash = c10::hash_combine(hash, 1);
    }
  }
  return hash;
}

}  // namespace

/// Holds an op's operands for as long as it runs.
/// Each op makes one and most end before the next begins, so every thread keeps the memory of one.
class SessionState::OpPins final : public at::ObserverContext, public OpenStorages {
 public:
  using OpenStorages::OpenStorages;

  static void* operator new(std::size_t bytes) {
    if (void* const memory = std::exchange(spare_, nullptr)) {
      return memory;
    }
    static thread_local const SpareEndsWithThread ends;
    (void)ends;
    return ::operator new(bytes);
  }
  static void operator delete(void* memory) noexcept {
    if (void* const another = std::exchange(spare_, memory)) {  // spares most the call
      ::operator delete(another);
    }
  }

 private:
  struct SpareEndsWithThread {
    SpareEndsWithThread() noexcept {}
    ~SpareEndsWithThread() { ::operator delete(std::exchange(spare_, nullptr)); }
  };
  /// Has no destructor, which each use would have to look for.
  static inline constinit thread_local void* spare_ = nullptr;
};

/// An op that runs though it was refused its operands: it fails at those that are kept closed.
struct SessionState::RefusedOp final : at::ObserverContext {
  explicit RefusedOp(std::shared_ptr<StorageRegistry> of) : registry(std::move(of)) {}
  ~RefusedOp() override {
    const std::scoped_lock lock(registry->mutex);
    for (const auto& storage : storages) {
      storage->end_refused_op();
    }
  }
  RefusedOp(const RefusedOp&) = delete;
  RefusedOp& operator=(const RefusedOp&) = delete;

  const std::shared_ptr<StorageRegistry> registry;
  OpenStorages::Storages storages;
};

/// Decides by the plan, where one is made; otherwise every block runs again.
class SessionState::Blocks final : public BlockPlanner {
 public:
  explicit Blocks(SessionState& session) : session_(session) {}

  Decision begin_call(std::uint64_t given_bytes) override {
    Decision decision{.runs_again = true, .meter = nullptr};
    if (session_.planner_ != nullptr) {
      decision = session_.planner_->begin_call(given_bytes);
    }
    if (decision.runs_again) {
      session_.take_in_replaced_buffers();  // only those that are known as such change once
    }
    return decision;
  }

 private:
  SessionState& session_;
};

SessionState::SessionState(const Config& config)
    : config_(config),
      state_format_(state_format(config.optimizer.states)),
      non_finite_(terrace::non_finite(config.optimizer.non_finite)),
      memory_(config),
      spillable_(
          memory_, registry_, [this](std::exception_ptr error) { refused(std::move(error)); },
          [this] { gradients_->notice_dead_storages(); }),
      updates_(std::make_unique<UpdateQueue>(memory_.stream(), memory_.cores().update_in_background,
                                             memory_.cores().update_threads, memory_.cores().update.processors)),
      gradients_(std::make_shared<Gradients>(memory_.stream(), registry_, program_mutex_)),
      chunk_bytes_(memory_.plan().chunk_bytes) {
  install_saved_tensor_hooks();
  settle_vector_functions();
  memory_.attach(*this);
  attach_program_memory(*this);
  attach_interceptor(*this);
  GeneratorState::set_device(memory_.program_device());
  if (const auto home = home_of_activations(config, memory_.program_device())) {
    const bool is_asked_for = config.placement.activations == "host" || config.placement.activations == "nvme";
    activations_ = std::make_shared<OffloadedActivations>(
        memory_, *home, is_asked_for, [this](std::exception_ptr error) { refused(std::move(error)); });
    activations_->open();
  }
  if (config.placement.activations == "auto" && activations_ != nullptr) {
    planner_ = std::make_shared<ActivationPlanner>([this] { return memory_.stream().usage(); });
  }
  if (planner_ != nullptr || config.placement.activations == "recompute") {
    set_block_planner(std::make_shared<Blocks>(*this));
  }
}

SessionState::~SessionState() = default;

void SessionState::close() noexcept {
  std::for_each(models_.begin(), models_.end(), [this](Model& model) { learn_at_end(model); });
  set_block_planner(nullptr);
  GeneratorState::set_device(at::kCPU);
  detach_interceptor();
  detach_program_memory();
  memory_.detach();
  gradients_->close();
  if (activations_ != nullptr) {
    activations_->close();
  }
  for (const ManagedParameter& parameter : parameters_) {
    parameter.storage->keep({});  // the accumulator holds the tensor, and so its storage
  }
  for (const auto& each : gathered_) {
    if (const auto open = each.lock()) {
      open->end();
    }
  }
  try {
    updates_->settle();
  } catch (...) {
    // Whose bytes it has cost says so below.
  }
  warn_of_refused_steps();
  try {
    restore_storages();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("the model's tensors stay managed after their session: ") + error.what());
  }
}

ManagedParameter* SessionState::find(const at::Tensor& tensor) noexcept {
  const auto found = by_storage_.find(ManagedStorage::of(tensor));
  return found == by_storage_.end() ? nullptr : found->second;
}

std::exception_ptr SessionState::last_error() const {
  const std::scoped_lock lock(error_mutex_);
  return last_error_;
}

at::ScalarType SessionState::gradient_type_of(at::ScalarType parameter) const noexcept {
  return gradient_type(parameter, config_.optimizer.accumulate == "float32");
}

void SessionState::require_gradient_type(const ManagedParameter& parameter) const {
  if (parameter.tensor.requires_grad()) {
    Gradients::require_type_asked_for(parameter, gradient_type_of(parameter.tensor.scalar_type()));
  }
}

void SessionState::end_step(bool gradients_rest) {
  if (places_gradients_by_notes()) {
    const auto held = lock();
    step_clock_.end_step(moment());
    is_in_forward_ = false;
  }
  if (updates_at_once()) {
    updates_->settle();
  }
  pass_ = Pass::unknown;
  memory_.stream().step_mark();
  if (planner_ != nullptr) {
    planner_->end_step();
  }
  memory_.hold_host();
  learn_of_models(gradients_rest);
}

void SessionState::warn_of_refused_steps() const noexcept {
  for (const std::exception_ptr& refusal : updates_->take_refusals()) {
    try {
      std::rethrow_exception(refusal);
    } catch (const std::exception& error) {
      log(LogLevel::warning, error.what());
    }
  }
}

void SessionState::notice_pass(Pass pass, std::span<const OpOperand> operands,
                               c10::ArrayRef<const c10::IValue> inputs) {
  // A backward belongs to its forward; what has no input of its own, such as clipping, to what runs.
  if (torch::autograd::get_current_graph_task_id() != -1) {
    if (is_in_forward_ && is_in_forward_.exchange(false)) {
      const auto held = lock();
      step_clock_.begin_backward(moment());
    }
    return;
  }
  const std::uint64_t input_shapes = shapes_of_ordinary_tensors(inputs);
  if (input_shapes == 0) {
    return;
  }
  ChunkId first = 0;
  {
    const auto held = lock();
    const auto managed = std::find_if(operands.begin(), operands.end(),
                                      [&](const OpOperand& operand) { return by_storage_.contains(operand.storage); });
    if (managed == operands.end()) {
      return;
    }
    first = managed->storage->chunk();
    if (pass == Pass::with_graph) {
      std::for_each(parameters_.begin(), parameters_.end(), Gradients::hook_last);
    }
    if (pass == Pass::with_graph && places_gradients_by_notes()) {
      step_clock_.begin_forward(moment());
      is_in_forward_ = true;
    }
  }
  // Told apart by what it computes with, too: programs train several models in turn.
  const bool trains = pass == Pass::with_graph;
  const bool begins =
      memory_.stream().begin_pass((input_shapes * 1'000'003 + first) * 2 + (trains ? 1 : 0),
                                  trains ? ScheduleBook::End::step : ScheduleBook::End::repetition, first);
  if (begins || trains) {
    pass_ = pass;
  }
}

StepClock::Moment SessionState::moment() const { return {monotonic_ns(), memory_.stream().usage().stall_seconds}; }

std::unique_ptr<at::ObserverContext> SessionState::pin(std::span<const OpOperand> operands,
                                                       c10::ArrayRef<const c10::IValue> inputs) noexcept {
  try {
    require_whole();
    memory_.computes_here();
    gradients_->notice_dead_storages();
    const Pass pass = at::GradMode::is_enabled() ? Pass::with_graph : Pass::without_graph;
    if (pass_.load(std::memory_order_relaxed) != pass) {
      notice_pass(pass, operands, inputs);
    }
    if (is_learning_.load(std::memory_order_relaxed)) {
      note_uses(operands);
    }
    auto pins = std::make_unique<OpPins>(memory_.stream());
    for (const OpOperand& operand : operands) {
      require_own(*operand.storage);
      if (operand.storage->is_spilled()) {
        continue;  // it could not come back, and says why
      }
      pins->add(*operand.storage, operand.writes ? Access::write : Access::read);
    }
    if (RecomputedBlock* const block = RecomputedBlock::recording()) {
      const auto held = lock();
      for (const OpOperand& operand : operands) {
        if (const auto found = by_storage_.find(operand.storage); found != by_storage_.end()) {
          block->depends_on_parameter(found->second->tensor);
        }
      }
    }
    pins->open(AccessOrigin::program);
    return pins;
  } catch (const std::exception& error) {
    refused(std::current_exception());
    auto refused_op = std::make_unique<RefusedOp>(registry_);
    // Those that others use stay open, if there is another at which the op fails.
    const std::scoped_lock lock(registry_->mutex);
    const auto own = [&](const OpOperand& operand) { return &operand.storage->registry() == registry_.get(); };
    const bool all_open = std::all_of(operands.begin(), operands.end(), [&](const OpOperand& operand) {
      return own(operand) && operand.storage->is_open();
    });
    for (const OpOperand& operand : operands) {
      if (own(operand) && (all_open || !operand.storage->is_open())) {
        operand.storage->begin_refused_op(std::string("terrace: '") + operand.storage->name() +
                                              "' could not be brought to the device: " + error.what(),
                                          std::current_exception());
        refused_op->storages.push_back(operand.storage->shared_from_this());
      }
    }
    return refused_op;
  }
}

void SessionState::note_uses(std::span<const OpOperand> operands) noexcept {
  std::uint64_t most = most_operands_.load(std::memory_order_relaxed);
  while (most < operands.size() && !most_operands_.compare_exchange_weak(most, operands.size())) {
  }
  if (pass_ == Pass::with_graph) {  // initialisation and evaluation may go another way
    for (const OpOperand& operand : operands) {
      operand.storage->note_use(first_uses_);
    }
  }
}

void SessionState::require_own(const ManagedStorage& storage) const {
  if (&storage.registry() != registry_.get()) {
    throw LogicError("'" + storage.name() + "' is left over from a session that has ended, where it did not fit");
  }
}

std::shared_ptr<BlockSource> SessionState::source() {
  gradients_->notice_dead_storages();
  return memory_.source();
}

void SessionState::refused(std::exception_ptr error) noexcept {
  NoFallback::refused();
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory&) {
    was_refused_memory_ = true;
  } catch (...) {  // it is for who asked
  }
  const std::scoped_lock lock(error_mutex_);
  last_error_ = std::move(error);
}

}  // namespace terrace
