// Parameters and buffers that died with their model: only the session, and what hangs on them, still has them.

#include <algorithm>
#include <list>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "integration/session_state.h"

namespace terrace {
namespace {

bool is_held_by_others(const at::Tensor& tensor, std::size_t holders) { return tensor.use_count() > holders; }

bool has_gradient_held_by_others(const ManagedParameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  if (gradient.defined() &&
      (is_held_by_others(gradient, 1) || (gradient.has_storage() && gradient.storage().use_count() > 1))) {
    return true;
  }
  const auto run = parameter.gradient.lock();
  return run && (!gradient.defined() || ManagedStorage::of(gradient) != run.get());
}

/// By a view, or by whoever has a tensor that shared it.
bool has_storage_held_by_others(const ManagedParameter& parameter) {
  return ManagedStorage::of(parameter.tensor) == parameter.storage.get() && parameter.tensor.storage().use_count() > 1;
}

bool is_dead(const ManagedParameter& parameter) {
  if (parameter.after_accumulation) {
    return false;  // an optimizer watches it
  }
  const auto accumulator = parameter.accumulator.lock();
  constexpr long kept_by_storage_and_here = 2;
  if (accumulator && accumulator.use_count() > kept_by_storage_and_here) {
    return false;  // a graph has it
  }
  return !is_held_by_others(parameter.tensor, accumulator ? 2 : 1) && !has_storage_held_by_others(parameter) &&
         !has_gradient_held_by_others(parameter);
}

}  // namespace

void SessionState::forget_dead() {
  const auto held = lock();
  for (std::size_t before = 0; before != buffers_.size() + parameters_.size();) {  // what dies may have held others
    before = buffers_.size() + parameters_.size();
    gradients_->notice_dead_storages();
    std::erase_if(buffers_, [](const ManagedBuffer& buffer) { return !is_held_by_others(buffer.tensor, 1); });
    forget_dead_parameters();
  }
}

void SessionState::forget_dead_parameters() {
  std::vector<std::list<ManagedParameter>::iterator> found;
  for (auto parameter = parameters_.begin(); parameter != parameters_.end(); ++parameter) {
    if (is_dead(*parameter)) {
      found.push_back(parameter);
    }
  }
  if (found.empty()) {
    return;
  }
  updates_->settle();  // which holds gradients, and chunks
  std::list<ManagedParameter> dead;
  for (const auto parameter : found) {
    if (ManagedStorage::of(parameter->tensor) != parameter->storage.get()) {
      gradients_->make_ordinary(*parameter->storage);  // which was replaced: whoever still holds it keeps its bytes
    }
    dead.splice(dead.end(), parameters_, parameter);
  }
  std::erase_if(models_, [&](Model& model) {
    const bool has_lost_some = std::any_of(dead.begin(), dead.end(), [&](const ManagedParameter& parameter) {
      return std::find(model.parameters.begin(), model.parameters.end(), &parameter) != model.parameters.end();
    });
    if (has_lost_some) {
      learn_at_end(model);
    }
    return has_lost_some;
  });
  for (const ManagedParameter& parameter : dead) {
    by_storage_.erase(parameter.storage.get());
    parameter.storage->keep({});  // the accumulator holds the tensor, and so its storage
    --set_infos_[parameter.chunk_set].parameters;
  }
  dead.clear();
  gradients_->notice_dead_storages();
  remove_empty_sets();
  note_waste();
}

}  // namespace terrace
