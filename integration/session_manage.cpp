// How a module's tensors come under management.

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

#include "base/error.h"
#include "integration/session_state.h"
#include "memory/layout.h"

namespace terrace {
namespace {

/// Two tensors over one storage would have a gradient each, and one update.
void require_same_tensor(const std::string& name, const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_same(other)) {
    throw LogicError("parameter '" + name + "' cannot be managed: it shares its storage with another parameter",
                     "to tie two parameters, register one tensor under both names");
  }
}

}  // namespace

void SessionState::manage(torch::nn::Module& module) {
  require_not_gathered("manage");
  require_whole();
  updates_->finish();  // what an update holds on the host could not leave
  take_in_replaced();
  UniqueNames unique = names();
  std::deque<ManagedParameter> found;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.numel() == 0) {
      continue;
    }
    if (const ManagedParameter* known = find(tensor)) {
      require_same_tensor(item.key(), tensor, known->tensor);
      continue;
    }
    if (const ManagedStorage* storage = ManagedStorage::of(tensor)) {
      require_own(*storage);
      throw LogicError("parameter '" + item.key() + "' has the storage of '" + storage->name() + "'");
    }
    ManagedParameter parameter;
    parameter.name = item.key();
    parameter.tensor = tensor;
    parameter.elements = static_cast<std::uint64_t>(tensor.numel());
    parameter.require_manageable();
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
  std::vector<ManagedParameter> ordered(std::make_move_iterator(found.begin()), std::make_move_iterator(found.end()));
  manage_parameters(ordered);
  manage_buffers(module, unique);
  check_room_to_work();
}

void SessionState::manage_parameters(std::span<ManagedParameter> found) {
  move_in_or_restore(found);
  const std::size_t first = parameters_.size();
  for (ManagedParameter& parameter : found) {
    parameter.gradient_chunk = chunk_sets_[parameter.chunk_set].gradient;
    ManagedParameter& kept = parameters_.emplace_back(std::move(parameter));
    by_storage_.emplace(kept.storage.get(), &kept);
  }
  for (std::size_t i = first; i < parameters_.size(); ++i) {
    watch(parameters_[i]);
  }
}

void SessionState::watch(ManagedParameter& parameter) {
  if (parameter.gradient_chunk) {
    gradients_->watch(parameter);
    gradients_->adopt(parameter);
  }
}

void SessionState::move_in_or_restore(std::span<ManagedParameter> found) {
  const std::size_t first_set = set_infos_.size();
  try {
    move_in(found);
  } catch (...) {
    for (const ManagedParameter& parameter : found) {
      if (parameter.storage) {
        restore(*parameter.storage);
      }
    }
    set_infos_.resize(chunk_sets_.size());
    for (auto set = static_cast<std::uint32_t>(first_set); set < set_infos_.size(); ++set) {
      remove_set(set);
    }
    throw;
  }
}

void SessionState::move_in(std::span<ManagedParameter> found) {
  // A group for each type, with and without gradients.
  std::vector<LayoutRun> runs;
  std::uint64_t built_on_host = 0;
  for (const ManagedParameter& parameter : found) {
    const at::Tensor& tensor = parameter.tensor;
    runs.push_back({.elements = parameter.elements,
                    .element_bytes = static_cast<std::uint32_t>(tensor.element_size()),
                    .group = static_cast<std::uint32_t>(tensor.scalar_type()) * 2 + (tensor.requires_grad() ? 1 : 0)});
    built_on_host += bytes_counted_by(*memory_.host_source(), storage_of(tensor)._mutable_data_ptr_no_checks());
  }
  const Layout layout = Layout::plan(runs, memory_.chunk_bytes());
  const auto first_set = static_cast<std::uint32_t>(set_infos_.size());
  for (const LayoutChunk& chunk : layout.chunks) {
    set_infos_.push_back({.type = static_cast<at::ScalarType>(chunk.group / 2),
                          .elements = chunk.elements,
                          .trainable = chunk.group % 2 == 1});
  }
  const auto end_set = static_cast<std::uint32_t>(set_infos_.size());
  std::vector<std::vector<ManagedParameter*>> members(layout.chunks.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].chunk_set = first_set + layout.places[i].chunk;
    found[i].element_offset = layout.places[i].element_offset;
    members[layout.places[i].chunk].push_back(&found[i]);
    ++set_infos_[found[i].chunk_set].parameters;
  }

  std::vector<ChunkRequest> parameter_chunks;
  std::vector<ChunkRequest> gradient_chunks;
  for (std::uint32_t set = first_set; set < end_set; ++set) {
    parameter_chunks.push_back({set, Kind::parameter});
    if (set_infos_[set].trainable) {
      gradient_chunks.push_back({set, Kind::gradient});
    }
  }
  // One chunk at a time: what the model held before is freed as its bytes move in.
  const std::vector<Tier> homes = choose_homes_for(parameter_chunks, config_.placement.parameters, built_on_host);
  for (std::uint32_t set = first_set; set < end_set; ++set) {
    chunk_sets_.emplace_back().parameter = add_chunk(parameter_chunks[set - first_set], homes[set - first_set]);
    fill_chunk(set, members[set - first_set]);
  }
  const std::vector<Tier> gradient_homes = choose_homes_for(gradient_chunks, config_.placement.gradients, 0);
  for (std::size_t i = 0; i < gradient_chunks.size(); ++i) {
    chunk_sets_[gradient_chunks[i].set].gradient = add_chunk(gradient_chunks[i], gradient_homes[i]);
  }
}

void SessionState::fill_chunk(std::uint32_t set, std::span<ManagedParameter*> members) {
  const std::array accesses{ChunkAccess{chunk_sets_[set].parameter, Tier::host, Access::write}};
  const Pin pin = memory_.stream().acquire(accesses);
  for (ManagedParameter* parameter : members) {
    attach_run(*parameter, pin);
  }
}

void SessionState::attach_run(ManagedParameter& parameter, const Pin& pin) {
  c10::StorageImpl& storage = storage_of(parameter.tensor);
  const auto* source = static_cast<const std::byte*>(storage.data());
  const std::uint64_t begin = parameter.element_offset * parameter.tensor.element_size();
  for (std::uint64_t done = 0; done < storage.nbytes();) {
    const std::span<std::byte> piece = pin.host_bytes(0, begin + done);
    const std::uint64_t bytes = std::min<std::uint64_t>(piece.size(), storage.nbytes() - done);
    std::memcpy(piece.data(), source + done, bytes);
    done += bytes;
  }
  parameter.storage =
      ManagedStorage::attach(storage, chunk_sets_[parameter.chunk_set].parameter, begin, parameter.name, registry_);
}

void SessionState::manage_buffers(torch::nn::Module& module, UniqueNames& names) {
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    const bool is_known = std::any_of(buffers_.begin(), buffers_.end(),
                                      [&](const ManagedBuffer& buffer) { return buffer.tensor.is_same(tensor); });
    if (tensor.defined() && !is_known && ManagedStorage::of(tensor) == nullptr) {
      take_in(tensor);
      buffers_.push_back({names.add(item.key()), tensor});
    }
  }
}

void SessionState::take_in(const at::Tensor& buffer) {
  if (!buffer.has_storage() || !buffer.device().is_cpu() || ManagedStorage::of(buffer) != nullptr) {
    return;
  }
  c10::StorageImpl& storage = storage_of(buffer);
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  const bool is_there =
      bytes_counted_by(*memory_.device_source(), data) > 0 && kind_of(data) == std::optional(Kind::buffer);
  if (storage.nbytes() == 0 || is_there) {
    return;
  }
  c10::DataPtr resident = allocate_from(memory_.device_source(), storage.nbytes(), Kind::buffer);
  std::memcpy(resident.mutable_get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(resident));
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
