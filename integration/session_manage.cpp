// How a module's tensors come under management.

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

#include "base/error.h"
#include "base/log.h"
#include "integration/byte_copies.h"
#include "integration/element_types.h"
#include "integration/pinned_run.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

/// Two tensors over one storage would have a gradient each, and one update.
void require_same_tensor(const std::string& name, const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_same(other)) {
    throw LogicError("parameter '" + name + "' cannot be managed: it shares its storage with another parameter",
                     "to tie two parameters, register one tensor under both names");
  }
}

/// As a parameter is.
bool is_in_a_chunk(const at::Tensor& tensor) {
  const ManagedStorage* const storage = ManagedStorage::of(tensor);
  return storage != nullptr && !storage->is_spilled();
}

}  // namespace

void SessionState::manage(torch::nn::Module& module) {
  const auto held = lock();
  require_not_gathered("manage", trained_sets());
  require_whole();
  updates_->finish();  // what an update holds on the host could not leave
  gradients_->notice_dead_storages();
  take_in_replaced();
  UniqueNames unique = names();
  std::vector<ManagedParameter> found;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.numel() == 0) {
      continue;
    }
    const auto still = tensor.has_storage() ? spillable_.hold(storage_of(tensor)) : SpillableStorages::Hold();
    if (const ManagedParameter* known = find(tensor)) {
      require_same_tensor(item.key(), tensor, known->tensor);
      continue;
    }
    if (const ManagedStorage* storage = ManagedStorage::of(tensor)) {
      require_own(*storage);
      if (!storage->is_spilled()) {
        throw LogicError("parameter '" + item.key() + "' has the storage of '" + storage->name() + "'");
      }
    }
    ManagedParameter parameter;
    parameter.name = item.key();
    parameter.tensor = tensor;
    parameter.elements = static_cast<std::uint64_t>(tensor.numel());
    parameter.require_manageable(memory_.program_device());
    if (spillable_.is_used_by_more_than(1, storage_of(tensor))) {
      throw LogicError("manage: '" + parameter.name + "' is gathered, or an op of another thread uses it",
                       "end what Session::gather returned first");
    }
    if (const auto [other, is_new] = seen.emplace(&storage_of(tensor), tensor); !is_new) {
      require_same_tensor(item.key(), tensor, other->second);
      std::find_if(found.begin(), found.end(), [&](const ManagedParameter& each) {
        return each.tensor.is_same(tensor);
      })->aliases.push_back(item.key());
      continue;
    }
    parameter.name = unique.add(item.key());
    found.push_back(std::move(parameter));
  }
  if (!found.empty()) {
    if (places_gradients_by_notes() || lays_out_by_notes()) {
      ModelNotesFile file(found);
      ModelNotes notes = file.load().value_or(ModelNotes());
      const ModelLayout chosen = choose_layout(found, notes);
      std::vector<const ManagedParameter*> managed = manage_parameters(found, chosen);
      models_.push_back({.file = std::move(file),
                         .notes = std::move(notes),
                         .parameters = std::move(managed),
                         .is_laid_out_by_use = chosen.is_by_use,
                         .largest_chunk_bytes = largest_on_device(chosen.layout)});
      is_learning_ = true;
    } else {
      manage_parameters(found, choose_layout(found, {}));
    }
  }
  note_waste();
  manage_buffers(module, unique);
  check_room_to_work();
  memory_.pin_host();
}

std::set<std::uint32_t> SessionState::trained_sets() const {
  std::set<std::uint32_t> sets;
  for (std::uint32_t set = 0; set < set_infos_.size(); ++set) {
    if (set_infos_[set].trainable) {
      sets.insert(set);
    }
  }
  return sets;
}

std::vector<const ManagedParameter*> SessionState::manage_parameters(std::span<ManagedParameter> found,
                                                                     const ModelLayout& chosen) {
  for (const ManagedParameter& parameter : found) {
    require_gradient_type(parameter);
  }
  move_in_or_restore(found, chosen);
  std::vector<ManagedParameter*> added;
  for (ManagedParameter& parameter : found) {
    parameter.number = ++managed_so_far_;
    parameter.gradient_chunk = chunk_sets_[parameter.chunk_set].gradient;
    parameter.gradient_type = gradient_type_of(parameter.tensor.scalar_type());
    ManagedParameter& kept = parameters_.emplace_back(std::move(parameter));
    by_storage_.emplace(kept.storage.get(), &kept);
    added.push_back(&kept);
  }
  for (ManagedParameter* parameter : added) {
    watch(*parameter);
  }
  return {added.begin(), added.end()};
}

void SessionState::watch(ManagedParameter& parameter) {
  ask_for_gradients_of(parameter.gradient_type, parameter.tensor);
  if (parameter.gradient_chunk) {
    gradients_->watch(parameter);
    gradients_->adopt_unless_seen(parameter);
  }
}

void SessionState::move_in_or_restore(std::span<ManagedParameter> found, const ModelLayout& chosen) {
  std::optional<SpillableStorages::NoUpdates> no_updates(std::in_place, spillable_);
  const std::size_t first_set = set_infos_.size();
  std::vector<FormerPlace> former;
  for (const ManagedParameter& parameter : found) {
    const auto still = spillable_.hold(storage_of(parameter.tensor));
    former.push_back(
        {.device = parameter.tensor.device(),
         .was_constructed = ManagedStorage::of(parameter.tensor) != nullptr || bytes_on_host(parameter.tensor) > 0});
  }
  try {
    move_in(found, chosen);
  } catch (...) {
    set_infos_.resize(chunk_sets_.size());
    for (auto set = static_cast<std::uint32_t>(first_set); set < set_infos_.size(); ++set) {
      bool are_restored = true;
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i].storage && found[i].chunk_set == set) {
          are_restored = move_out(found[i], former[i]) && are_restored;
        }
      }
      if (are_restored) {
        remove_set(set);  // before the next: what leaves again needs its room
      }
    }
    no_updates.reset();
    spillable_.leave_room_for_updates();
    throw;
  }
}

bool SessionState::move_out(const ManagedParameter& parameter, const FormerPlace& former) noexcept {
  try {
    const std::uint64_t bytes = parameter.tensor.nbytes();
    c10::DataPtr data = former.was_constructed ? allocate_from(memory_.host_source(), bytes, Kind::other)
                                               : allocate_ordinary(bytes, former.device);
    if (former.device == parameter.tensor.device()) {
      restore(*parameter.storage, std::move(data));
    } else {
      read_run(*parameter.storage, bytes, data);
      const at::Tensor there = tensor_without_memory(parameter.tensor, former.device);
      storage_of(there).set_data_ptr_noswap(std::move(data));
      parameter.tensor.set_data(there);
    }
    spillable_.hold(storage_of(parameter.tensor));  // known again, as one that can leave
    return true;
  } catch (const std::exception& error) {
    log(LogLevel::warning, "'" + parameter.name + "' stays managed: " + error.what());
    left_behind_.push_back(parameter.storage);
    return false;
  }
}

void SessionState::move_in(std::span<ManagedParameter> found, const ModelLayout& chosen) {
  RestingRoom to_be_freed{};
  std::uint64_t largest_tensor = 0;
  std::unordered_map<const ManagedParameter*, BytesOnHost> on_host;
  for (const ManagedParameter& parameter : found) {
    const at::Tensor& tensor = parameter.tensor;
    const auto still = spillable_.hold(storage_of(tensor));
    const std::uint64_t block = bytes_on_host(tensor);
    const bool was_constructed = ManagedStorage::of(tensor) != nullptr || block > 0;
    on_host[&parameter] = {.now = block, .as_it_moves = was_constructed ? tensor.nbytes() : 0};
    to_be_freed[index_of(Tier::host)] += block;
    if (ManagedStorage::of(tensor) != nullptr) {
      to_be_freed[index_of(Tier::nvme)] += memory_.stream().room_bytes(tensor.nbytes())[index_of(Tier::nvme)];
    }
    largest_tensor = std::max<std::uint64_t>(largest_tensor, tensor.nbytes());
  }
  const auto first_set = static_cast<std::uint32_t>(set_infos_.size());
  const std::vector<std::vector<ManagedParameter*>> members = lay_out(found, chosen);
  const auto end_set = static_cast<std::uint32_t>(set_infos_.size());

  std::vector<ChunkRequest> parameter_chunks;
  std::vector<ChunkRequest> gradient_chunks;
  for (std::uint32_t set = first_set; set < end_set; ++set) {
    parameter_chunks.push_back({set, Kind::parameter});
    if (set_infos_[set].trainable) {
      gradient_chunks.push_back({set, Kind::gradient});
    }
  }
  // One chunk at a time: what the model held before is freed as its bytes move in.
  const std::vector<Tier> homes = choose_homes_for(parameter_chunks, config_.placement.parameters, to_be_freed);
  require_room_to_move_in(parameter_chunks, homes, members, on_host);
  for (std::uint32_t set = first_set; set < end_set; ++set) {
    const SpillableStorages::Room room(spillable_,
                                       room_to_move_in(bytes_of(parameter_chunks[set - first_set]), largest_tensor));
    chunk_sets_.emplace_back().parameter = add_chunk(parameter_chunks[set - first_set], homes[set - first_set]);
    fill_chunk(set, members[set - first_set]);
    gradients_->notice_dead_storages();  // what was spilled gives up its room
  }
  const std::vector<Tier> gradient_homes = choose_homes_for(gradient_chunks, config_.placement.gradients, {});
  for (std::size_t i = 0; i < gradient_chunks.size(); ++i) {
    chunk_sets_[gradient_chunks[i].set].gradient = add_chunk(gradient_chunks[i], gradient_homes[i]);
  }
}

void SessionState::fill_chunk(std::uint32_t set, std::span<ManagedParameter* const> members) {
  const std::array accesses{ChunkAccess{chunk_sets_[set].parameter, Tier::host, Access::write}};
  const Pin pin = memory_.stream().acquire(accesses);
  for (ManagedParameter* parameter : members) {
    attach_run(*parameter, pin);
  }
}

std::uint64_t SessionState::room_to_move_in(std::uint64_t chunk_bytes, std::uint64_t largest_tensor) const {
  const auto room = [&](std::uint64_t bytes) { return memory_.stream().room_bytes(bytes)[index_of(Tier::host)]; };
  return room(chunk_bytes) + room(largest_tensor);
}

void SessionState::attach_run(ManagedParameter& parameter, const Pin& pin) {
  c10::StorageImpl& storage = storage_of(parameter.tensor);
  const std::uint64_t begin = parameter.element_offset * parameter.tensor.element_size();
  const auto held = spillable_.hold(storage);
  Pin spilled;
  if (const ManagedStorage* const run = ManagedStorage::of(storage)) {
    require_own(*run);
    const std::array accesses{ChunkAccess{run->chunk(), Tier::host, Access::read}};
    spilled = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
  }
  const c10::Device device = storage.device();
  const auto* const source = ManagedStorage::of(storage) ? nullptr : static_cast<const std::byte*>(storage.data());
  visit_pinned_run(pin, begin, storage.nbytes(), [&](std::span<std::byte> piece, std::uint64_t done) {
    if (source != nullptr) {
      copy_bytes(piece.data(), at::kCPU, source + done, device, piece.size());
      return;
    }
    visit_pinned_run(spilled, done, piece.size(), [&](std::span<const std::byte> from, std::uint64_t copied) {
      std::memcpy(piece.data() + copied, from.data(), from.size());
    });
  });
  const auto attach = [&](c10::StorageImpl& to) {
    parameter.storage =
        ManagedStorage::attach(to, chunk_sets_[parameter.chunk_set].parameter, begin, parameter.name, registry_);
  };
  if (device == memory_.program_device()) {
    spillable_.forget(storage);
    attach(storage);
    return;
  }
  // As Module::to would: whoever shares the storage keeps it as it is.
  const at::Tensor there = tensor_without_memory(parameter.tensor, memory_.program_device());
  attach(storage_of(there));
  parameter.tensor.set_data(there);
}

std::uint64_t SessionState::bytes_on_host(const at::Tensor& tensor) const {
  return bytes_counted_by(*memory_.host_source(), storage_of(tensor)._mutable_data_ptr_no_checks());
}

void SessionState::manage_buffers(torch::nn::Module& module, UniqueNames& names) {
  std::erase_if(buffers_, [](const ManagedBuffer& buffer) { return is_in_a_chunk(buffer.tensor); });
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    const bool is_known = std::any_of(buffers_.begin(), buffers_.end(),
                                      [&](const ManagedBuffer& buffer) { return buffer.tensor.is_same(tensor); });
    if (tensor.defined() && !is_known && !is_in_a_chunk(tensor)) {
      take_in(tensor);
      buffers_.push_back({names.add(item.key()), tensor});
    }
  }
}

void SessionState::take_in(const at::Tensor& buffer) {
  const c10::Device device = memory_.program_device();
  if (!buffer.has_storage() || (!buffer.device().is_cpu() && buffer.device() != device) || is_in_a_chunk(buffer)) {
    return;
  }
  c10::StorageImpl& storage = storage_of(buffer);
  const auto held = spillable_.hold_here(storage);
  if (const ManagedStorage* const run = ManagedStorage::of(storage)) {
    require_own(*run);
  }
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  const bool is_there =
      bytes_counted_by(*memory_.device_source(), data) > 0 && kind_of(data) == std::optional(Kind::buffer);
  if (storage.nbytes() == 0 || is_there) {
    return;
  }
  c10::DataPtr resident = allocate_from(memory_.device_source(), storage.nbytes(), Kind::buffer, device);
  copy_bytes(resident.mutable_get(), device, storage.data(), storage.device(), storage.nbytes());
  if (storage.device() == device) {
    storage.set_data_ptr_noswap(std::move(resident));
    spillable_.forget(storage);
    return;
  }
  const at::Tensor there = tensor_without_memory(buffer, device);
  storage_of(there).set_data_ptr_noswap(std::move(resident));
  buffer.set_data(there);
}

UniqueNames SessionState::names() const {
  UniqueNames names;
  for (const ManagedParameter& parameter : parameters_) {
    names.add(parameter.name);
  }
  for (const ManagedBuffer& buffer : buffers_) {
    names.add(buffer.name);
  }
  return names;
}

}  // namespace terrace
