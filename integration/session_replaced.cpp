// Parameters and buffers that are no longer what came under management: their storage was replaced, by set_data,
// Module::to or torch::load, or a parameter needs a gradient now.

#include <utility>

#include "base/error.h"
#include "integration/session_state.h"

namespace terrace {

void SessionState::take_in_replaced_buffers() {
  const auto held = lock();
  for (const ManagedBuffer& buffer : buffers_) {
    take_in(buffer.tensor);
  }
}

void SessionState::take_in_replaced() {
  const auto held = lock();
  forget_dead();
  take_in_replaced_buffers();
  std::vector<ManagedParameter*> same;
  std::vector<ManagedParameter*> anew;
  for (ManagedParameter& parameter : parameters_) {
    const auto still =
        parameter.tensor.has_storage() ? spillable_.hold(storage_of(parameter.tensor)) : SpillableStorages::Hold();
    const ManagedStorage* const now = ManagedStorage::of(parameter.tensor);
    const bool is_unfrozen = parameter.tensor.requires_grad() && !parameter.gradient_chunk;
    if (now == parameter.storage.get()) {
      if (is_unfrozen) {
        anew.push_back(&parameter);
      }
      continue;
    }
    if (now != nullptr) {
      require_own(*now);
    }
    if (now != nullptr && !now->is_spilled()) {
      throw LogicError("parameter '" + parameter.name + "' has been given the storage of '" + now->name() + "'",
                       "give it a copy of its own");
    }
    parameter.require_manageable(memory_.program_device());
    const bool has_same_run = parameter.tensor.scalar_type() == set_infos_[parameter.chunk_set].type &&
                              static_cast<std::uint64_t>(parameter.tensor.numel()) == parameter.elements;
    if (!has_same_run) {
      updates_->settle();  // which decides whether the last one counts
    }
    if (!has_same_run && *parameter.updates > 0) {
      throw LogicError("parameter '" + parameter.name + "' has another type or size since it was updated",
                       "change it before the first step, or end its optimizer first");
    }
    (has_same_run && !is_unfrozen ? same : anew).push_back(&parameter);
  }
  if (same.empty() && anew.empty()) {
    return;
  }
  updates_->settle();  // what an update holds on the host could not leave
  for (ManagedParameter* parameter : same) {
    refill(*parameter);
  }
  // A chunk's worth at a time: meanwhile they are ordinary tensors on the device.
  for (auto first = anew.begin(); first != anew.end();) {
    std::uint64_t bytes = 0;
    auto end = first;
    while (end != anew.end() && (end == first || bytes < chunk_bytes_)) {
      bytes += (*end++)->tensor.nbytes();
    }
    manage_anew({first, end});
    first = end;
  }
  note_waste();
}

void SessionState::refill(ManagedParameter& parameter) {
  memory_.computes_here();
  // Whoever still holds the storage before keeps its bytes.
  gradients_->make_ordinary(*parameter.storage);
  {
    const std::uint64_t chunk_bytes = bytes_of({parameter.chunk_set, Kind::parameter});
    const SpillableStorages::Room room(spillable_, room_to_move_in(chunk_bytes, parameter.tensor.nbytes()));
    const std::array accesses{ChunkAccess{chunk_sets_[parameter.chunk_set].parameter, Tier::host, Access::write}};
    const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
    const std::shared_ptr<ManagedStorage> before = parameter.storage;
    attach_run(parameter, pin);
    by_storage_.erase(before.get());
    by_storage_.emplace(parameter.storage.get(), &parameter);
  }
  watch(parameter);
}

void SessionState::manage_anew(std::span<ManagedParameter*> parameters) {
  memory_.computes_here();
  std::vector<ManagedParameter> copies;
  for (const ManagedParameter* parameter : parameters) {
    gradients_->make_ordinary(*parameter->storage);
    if (const auto gradient = parameter->gradient.lock()) {
      gradients_->make_ordinary(*gradient);
    }
    ManagedParameter& copy = copies.emplace_back();
    copy.name = parameter->name;
    copy.tensor = parameter->tensor;
    copy.elements = static_cast<std::uint64_t>(parameter->tensor.numel());
  }
  move_in_or_restore(copies, choose_layout(copies, {}));
  // All of them have their new runs before anything else may fail.
  for (std::size_t i = 0; i < copies.size(); ++i) {
    ManagedParameter& parameter = *parameters[i];
    by_storage_.erase(parameter.storage.get());
    --set_infos_[parameter.chunk_set].parameters;
    parameter.storage = std::move(copies[i].storage);
    parameter.chunk_set = copies[i].chunk_set;
    parameter.element_offset = copies[i].element_offset;
    parameter.elements = copies[i].elements;
    parameter.gradient_chunk = chunk_sets_[parameter.chunk_set].gradient;
    parameter.gradient_type = gradient_type_of(parameter.tensor.scalar_type());
    by_storage_.emplace(parameter.storage.get(), &parameter);
  }
  remove_empty_sets();
  for (ManagedParameter* parameter : parameters) {
    watch(*parameter);
  }
  check_room_to_work();
}

}  // namespace terrace
