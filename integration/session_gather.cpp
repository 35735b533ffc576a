// Tensors whose bytes the program reaches itself, for a while.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "integration/session_state.h"

namespace terrace {

Gathered SessionState::gather(std::vector<at::Tensor> tensors, Access mode) {
  require_whole();
  OpenStorages::Storages storages;
  std::vector<ChunkAccess> accesses;
  for (const at::Tensor& tensor : tensors) {
    if (ManagedStorage* storage = ManagedStorage::of(tensor)) {
      require_own(*storage);
      storages.push_back(storage->shared_from_this());
      accesses.push_back({storage->chunk(), Tier::device, mode});
    }
  }
  gradients_->notice_dead_storages();
  std::erase_if(gathered_, [](const auto& each) { return each.expired(); });
  Pin pin = accesses.empty() ? Pin() : memory_.stream().acquire(accesses, AccessOrigin::beside_program);
  auto open = std::make_shared<OpenStorages>(registry_, std::move(pin), std::move(storages));
  gathered_.push_back(open);
  return {std::move(tensors), std::move(open)};
}

void SessionState::for_each_parameter(const std::function<void(const std::string&, at::Tensor&)>& visit, Access mode) {
  for (const ManagedParameter& parameter : parameters_) {
    const Gathered gathered = gather({parameter.tensor}, mode);
    at::Tensor handle = parameter.tensor;
    visit(parameter.name, handle);
    if (!handle.is_same(parameter.tensor)) {
      throw LogicError("for_each_parameter: '" + parameter.name + "' was given another tensor",
                       "change it in place, as by copy_");
    }
  }
}

void SessionState::require_not_gathered(const std::string& what) const {
  for (const auto& each : gathered_) {
    const auto open = each.lock();
    if (!open) {
      continue;
    }
    for (const auto& storage : open->storages()) {
      const auto parameter = by_storage_.find(storage.get());
      if (parameter == by_storage_.end() || parameter->second->gradient_chunk) {
        throw LogicError(what + ": '" + storage->name() + "' is gathered", "end what Session::gather returned first");
      }
    }
  }
}

}  // namespace terrace
