// Parameters and buffers that died with their model: only the session, and what hangs on them, still has them.

#include <algorithm>
#include <exception>

#include <torch/csrc/autograd/function.h>

#include "base/log.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

/// Views have its storage, too.
bool is_held_by_others(const at::Tensor& tensor, std::size_t holders) {
  return tensor.use_count() > holders || (tensor.has_storage() && tensor.storage().use_count() > 1);
}

bool has_gradient_held_by_others(const ManagedParameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  if (gradient.defined() && is_held_by_others(gradient, 1)) {
    return true;
  }
  const auto run = parameter.gradient.lock();
  return run && (!gradient.defined() || ManagedStorage::of(gradient) != run.get());
}

bool is_dead(const ManagedParameter& parameter) {
  if (parameter.before_accumulation || parameter.after_accumulation) {
    return false;  // an optimizer watches it
  }
  const auto accumulator = parameter.accumulator.lock();
  constexpr long kept_by_storage_and_here = 2;
  if (accumulator && accumulator.use_count() > kept_by_storage_and_here) {
    return false;  // a graph has it
  }
  return !is_held_by_others(parameter.tensor, accumulator ? 2 : 1) && !has_gradient_held_by_others(parameter);
}

}  // namespace

void SessionState::forget_dead() {
  const auto held = lock();
  gradients_->notice_dead_storages();
  std::erase_if(buffers_, [](const ManagedBuffer& buffer) { return !is_held_by_others(buffer.tensor, 1); });
  if (std::none_of(parameters_.begin(), parameters_.end(), is_dead)) {
    return;
  }
  updates_->settle();  // which holds gradients, and chunks
  std::list<ManagedParameter> dead;
  for (auto next = parameters_.begin(); next != parameters_.end();) {
    const auto parameter = next++;
    if (is_dead(*parameter)) {
      dead.splice(dead.end(), parameters_, parameter);
    }
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
