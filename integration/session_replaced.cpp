// Parameters that are no longer what came under management: their storage was replaced, by set_data, Module::to or
// torch::load, or they need a gradient now.

#include <utility>

#include "base/error.h"
#include "integration/session_state.h"

namespace terrace {

void SessionState::take_in_replaced() {
  std::vector<ManagedParameter*> anew;
  for (ManagedParameter& parameter : parameters_) {
    const ManagedStorage* const now = ManagedStorage::of(parameter.tensor);
    if (now == parameter.storage.get()) {
      if (parameter.tensor.requires_grad() && !parameter.gradient_chunk) {
        anew.push_back(&parameter);  // it was frozen
      }
      continue;
    }
    if (now != nullptr) {
      throw LogicError("parameter '" + parameter.name + "' has been given the storage of '" + now->name() + "'",
                       "give it a copy of its own");
    }
    parameter.require_manageable();
    if (parameter.tensor.scalar_type() == set_infos_[parameter.chunk_set].type &&
        static_cast<std::uint64_t>(parameter.tensor.numel()) == parameter.elements) {
      refill(parameter);
    } else if (parameter.updates > 0) {
      throw LogicError("parameter '" + parameter.name + "' has another type or size since it was updated",
                       "change it before the first step, or end its optimizer first");
    } else {
      anew.push_back(&parameter);
    }
  }
  // A chunk's worth at a time: meanwhile they are ordinary tensors on the device.
  for (auto first = anew.begin(); first != anew.end();) {
    std::uint64_t bytes = 0;
    auto end = first;
    while (end != anew.end() && (end == first || bytes < memory_.chunk_bytes())) {
      bytes += (*end++)->tensor.nbytes();
    }
    manage_anew({first, end});
    first = end;
  }
}

void SessionState::refill(ManagedParameter& parameter) {
  // Whoever still holds the storage before keeps its bytes.
  gradients_->make_ordinary(*parameter.storage);
  by_storage_.erase(parameter.storage.get());
  {
    const std::array accesses{ChunkAccess{chunk_sets_[parameter.chunk_set].parameter, Tier::host, Access::write}};
    const Pin pin = memory_.stream().acquire(accesses);
    attach_run(parameter, pin);
  }
  by_storage_.emplace(parameter.storage.get(), &parameter);
  watch(parameter);
}

void SessionState::manage_anew(std::span<ManagedParameter*> parameters) {
  updates_->finish();
  std::vector<ManagedParameter> copies;
  for (const ManagedParameter* parameter : parameters) {
    gradients_->make_ordinary(*parameter->storage);
    ManagedParameter& copy = copies.emplace_back();
    copy.name = parameter->name;
    copy.tensor = parameter->tensor;
    copy.elements = static_cast<std::uint64_t>(parameter->tensor.numel());
  }
  move_in_or_restore(copies);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    ManagedParameter& parameter = *parameters[i];
    const std::uint32_t set_before = parameter.chunk_set;
    if (const auto gradient = parameter.gradient.lock()) {
      gradients_->make_ordinary(*gradient);
    }
    by_storage_.erase(parameter.storage.get());
    parameter.storage = std::move(copies[i].storage);
    parameter.chunk_set = copies[i].chunk_set;
    parameter.element_offset = copies[i].element_offset;
    parameter.elements = copies[i].elements;
    parameter.gradient_chunk = chunk_sets_[parameter.chunk_set].gradient;
    by_storage_.emplace(parameter.storage.get(), &parameter);
    if (--set_infos_[set_before].parameters == 0) {
      remove_set(set_before);
    }
    watch(parameter);
  }
  check_room_to_work();
}

}  // namespace terrace
