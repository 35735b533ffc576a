// Tensors whose bytes the program reaches itself, for a while.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "integration/session_state.h"
#include "memory/current_op.h"

namespace terrace {

Gathered SessionState::gather(std::vector<at::Tensor> tensors, Access mode) {
  const OpScope scope("Session::gather");
  // To the end: a step of another thread comes either before all of this or finds the view.
  const auto held = lock();
  require_whole();
  memory_.computes_here();
  gradients_->notice_dead_storages();
  auto gathered = std::make_shared<OpenStorages>(memory_.stream());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      gathered->keep(spillable_.hold_here(storage_of(tensor)));
    }
    if (ManagedStorage* const storage = ManagedStorage::of(tensor)) {
      require_own(*storage);
      gathered->add(*storage, mode);
    }
  }
  std::erase_if(gathered_, [](const auto& each) { return each.expired(); });
  gathered->open(AccessOrigin::beside_program);
  updates_->throw_refusal();
  gathered_.push_back(gathered);
  return {std::move(tensors), std::move(gathered)};
}

void SessionState::for_each_parameter(const std::function<void(const std::string&, at::Tensor&)>& visit, Access mode) {
  for (std::uint64_t visited = 0;;) {
    std::string name;
    at::Tensor tensor;
    {
      const auto held = lock();  // but not while `visit` runs, which may wait for other threads
      const auto next = std::find_if(parameters_.begin(), parameters_.end(),
                                     [&](const ManagedParameter& parameter) { return parameter.number > visited; });
      if (next == parameters_.end()) {
        return;
      }
      visited = next->number;
      name = next->name;
      tensor = next->tensor;
    }
    const Gathered gathered = gather({tensor}, mode);
    at::Tensor handle = tensor;
    visit(name, handle);
    if (!handle.is_same(tensor)) {
      throw LogicError("for_each_parameter: '" + name + "' was given another tensor",
                       "change it in place, as by copy_");
    }
  }
}

void SessionState::require_not_gathered(const std::string& what, const std::set<std::uint32_t>& sets) const {
  for (const auto& each : gathered_) {
    const auto open = each.lock();
    if (!open) {
      continue;
    }
    for (const auto& storage : open->storages()) {
      const bool is_in_them = std::any_of(sets.begin(), sets.end(), [&](std::uint32_t set) {
        return storage->chunk() == chunk_sets_[set].parameter || storage->chunk() == chunk_sets_[set].gradient;
      });
      if (is_in_them) {
        throw LogicError(what + ": '" + storage->name() + "' is gathered", "end what Session::gather returned first");
      }
    }
  }
}

void SessionState::require_nothing_gathered(const std::string& what) {
  std::erase_if(gathered_, [](const auto& each) { return each.expired(); });
  if (!gathered_.empty()) {
    throw LogicError(what + ": tensors are gathered", "end what Session::gather returned first");
  }
}

}  // namespace terrace
