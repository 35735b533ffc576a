// How a module's tensors come under management, and how they leave it.

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/pause.h"
#include "integration/session_state.h"
#include "memory/layout.h"

namespace terrace {
namespace {

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool needs_master(at::ScalarType type) { return type != at::kFloat; }

void require_manageable(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& why) {
    throw LogicError("parameter '" + name + "' cannot be managed: " + why);
  };
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    refuse("it has no dense storage");
  }
  if (!tensor.device().is_cpu()) {
    refuse("it is on " + tensor.device().str() + ", not on the session's device");
  }
  if (tensor.storage_offset() != 0 || !tensor.is_non_overlapping_and_dense() ||
      storage_of(tensor).nbytes() != tensor.nbytes()) {
    refuse("it does not cover a storage of its own (a view of another tensor?)");
  }
}

/// Two tensors over one storage would have a gradient each, and one update.
void require_same_tensor(const std::string& name, const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_same(other)) {
    throw LogicError("parameter '" + name + "' cannot be managed: it shares its storage with another parameter",
                     "to tie two parameters, register one tensor under both names");
  }
}

std::uint64_t saturating_subtract(std::uint64_t from, std::uint64_t what) { return from - std::min(from, what); }

}  // namespace

void SessionState::manage(torch::nn::Module& module) {
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
    if (ManagedStorage::of(tensor) != nullptr) {
      throw LogicError("parameter '" + item.key() +
                       "' is left over from a session that has ended, where it did not fit");
    }
    require_manageable(item.key(), tensor);
    if (const auto [other, is_new] = seen.emplace(&storage_of(tensor), tensor); !is_new) {
      require_same_tensor(item.key(), tensor, other->second);
      continue;  // tied: listed under another name too
    }
    ManagedParameter parameter;
    parameter.name = item.key();
    parameter.tensor = tensor;
    parameter.elements = static_cast<std::uint64_t>(tensor.numel());
    found.push_back(std::move(parameter));
  }
  std::vector<ManagedParameter> ordered(std::make_move_iterator(found.begin()), std::make_move_iterator(found.end()));
  manage_parameters(ordered);
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    if (item.value().defined() && item.value().has_storage() && ManagedStorage::of(item.value()) == nullptr &&
        seen.emplace(&storage_of(item.value()), item.value()).second) {
      manage_buffer(item.value());
    }
  }
  check_room_to_work();
}

void SessionState::manage_parameters(std::span<ManagedParameter> found) {
  const std::size_t first_set = set_infos_.size();
  try {
    move_in(found);
  } catch (...) {
    // The module is as it was before; chunks made so far stay registered and hold nothing.
    for (const ManagedParameter& parameter : found) {
      if (parameter.storage) {
        restore(*parameter.storage);
      }
    }
    set_infos_.resize(chunk_sets_.size());
    for (std::size_t set = first_set; set < set_infos_.size(); ++set) {
      set_infos_[set].trainable = false;
    }
    throw;
  }
  const std::size_t first = parameters_.size();
  for (ManagedParameter& parameter : found) {
    parameter.gradient_chunk = chunk_sets_[parameter.chunk_set].gradient;
    ManagedParameter& kept = parameters_.emplace_back(std::move(parameter));
    by_storage_.emplace(kept.storage.get(), &kept);
    if (kept.gradient_chunk) {
      gradients_->watch(kept);
    }
  }
  for (std::size_t i = first; i < parameters_.size(); ++i) {
    if (parameters_[i].gradient_chunk) {
      gradients_->adopt(parameters_[i]);
    }
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
  const ChunkId chunk = chunk_sets_[set].parameter;
  const std::array accesses{Access{chunk, Tier::host, AccessMode::write}};
  const Pin pin = memory_.stream().acquire(accesses);
  for (ManagedParameter* parameter : members) {
    c10::StorageImpl& storage = storage_of(parameter->tensor);
    const auto* source = static_cast<const std::byte*>(storage.data());
    const std::uint64_t begin = parameter->element_offset * parameter->tensor.element_size();
    for (std::uint64_t done = 0; done < storage.nbytes();) {
      const std::span<std::byte> piece = pin.host_bytes(0, begin + done);
      const std::uint64_t bytes = std::min<std::uint64_t>(piece.size(), storage.nbytes() - done);
      std::memcpy(piece.data(), source + done, bytes);
      done += bytes;
    }
    parameter->storage = ManagedStorage::attach(storage, chunk, begin, parameter->name, registry_);
  }
}

void SessionState::manage_buffer(const at::Tensor& buffer) {
  c10::StorageImpl& storage = storage_of(buffer);
  if (storage.nbytes() == 0) {
    return;
  }
  c10::DataPtr resident = allocate_from(memory_.device_source(), storage.nbytes(), Kind::buffer);
  std::memcpy(resident.mutable_get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(resident));
}

void SessionState::add_optimizer_chunks() {
  std::vector<ChunkRequest> requests;
  for (const Kind kind : {Kind::master, Kind::momentum, Kind::variance}) {
    for (std::uint32_t set = 0; set < chunk_sets_.size(); ++set) {
      const SetInfo& info = set_infos_[set];
      if (!info.trainable || chunk_sets_[set].momentum || (info.type != at::kFloat && info.type != at::kBFloat16)) {
        continue;
      }
      if (kind != Kind::master || needs_master(info.type)) {
        requests.push_back({set, kind});
      }
    }
  }
  const std::vector<Tier> homes = choose_homes_for(requests, config_.placement.optimizer, 0);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const ChunkId id = add_chunk(requests[i], homes[i]);
    ChunkSet& set = chunk_sets_[requests[i].set];
    (requests[i].kind == Kind::master     ? set.master
     : requests[i].kind == Kind::momentum ? set.momentum
                                          : set.variance) = id;
  }
  check_room_to_work();
}

std::vector<Tier> SessionState::choose_homes_for(std::span<const ChunkRequest> requests,
                                                 const std::optional<Config::Shares>& shares,
                                                 std::uint64_t host_bytes_to_be_freed) const {
  std::vector<std::array<std::uint64_t, tier_count>> rooms;
  std::uint64_t largest_on_device = 0;
  for (const ChunkRequest& request : requests) {
    rooms.push_back(memory_.stream().room_bytes(bytes_of(request)));
    largest_on_device = std::max(largest_on_device, rooms.back()[index_of(Tier::device)]);
  }
  std::uint64_t largest_update = 0;
  for (std::uint32_t set = 0; set < set_infos_.size(); ++set) {
    largest_update = std::max(largest_update, update_room(set));
  }
  const Budget& host = memory_.budget(Tier::host);
  const Budget& device = memory_.budget(Tier::device);
  RestingRoom room{};
  room[index_of(Tier::host)] =
      saturating_subtract(host.capacity(), rested_[index_of(Tier::host)] + largest_update +
                                               saturating_subtract(host.used(Kind::other), host_bytes_to_be_freed));
  room[index_of(Tier::nvme)] = memory_.budget(Tier::nvme).capacity() - rested_[index_of(Tier::nvme)];
  room[index_of(Tier::device)] =
      saturating_subtract(std::min(device.capacity(), memory_.device_chunk_limit()),
                          rested_[index_of(Tier::device)] + 2 * largest_on_device + device.used(Kind::buffer));
  return choose_homes(rooms, shares, room);
}

ChunkId SessionState::add_chunk(const ChunkRequest& request, Tier home) {
  const std::uint64_t bytes = bytes_of(request);
  const ChunkId id = memory_.stream().add_chunk(request.kind, request.set, bytes, home);
  rested_[index_of(home)] += memory_.stream().room_bytes(bytes)[index_of(home)];
  return id;
}

std::uint64_t SessionState::bytes_of(const ChunkRequest& request) const {
  const SetInfo& info = set_infos_[request.set];
  const bool in_parameter_type = request.kind == Kind::parameter || request.kind == Kind::gradient;
  return info.elements * (in_parameter_type ? c10::elementSize(info.type) : sizeof(float));
}

std::uint64_t SessionState::update_room(std::uint32_t set) const {
  const auto room = [&](Kind kind) { return memory_.stream().room_bytes(bytes_of({set, kind}))[index_of(Tier::host)]; };
  std::uint64_t bytes = room(Kind::parameter);
  if (set_infos_[set].trainable) {
    bytes += room(Kind::gradient) + room(Kind::momentum) + room(Kind::variance);
    bytes += needs_master(set_infos_[set].type) ? room(Kind::master) : 0;
  }
  return bytes;
}

void SessionState::check_room_to_work() const {
  std::uint64_t largest_on_device = 0;
  std::uint64_t largest_update = 0;
  memory_.stream().inspect([&](const Policy& policy) {
    for (const ChunkSet& set : chunk_sets_) {
      std::uint64_t update = 0;
      for (const auto& id : {std::optional(set.parameter), set.gradient, set.master, set.momentum, set.variance}) {
        if (!id) {
          continue;
        }
        const ChunkInfo& info = policy.chunk(*id).info();
        update += info.home == Tier::host ? 0 : info.room_bytes[index_of(Tier::host)];
        const bool computed_with = info.kind == Kind::parameter || info.kind == Kind::gradient;
        if (computed_with && info.home != Tier::device) {
          largest_on_device = std::max(largest_on_device, info.room_bytes[index_of(Tier::device)]);
        }
      }
      largest_update = std::max(largest_update, update);
    }
  });
  const Budget& host = memory_.budget(Tier::host);
  const std::uint64_t host_needed = rested_[index_of(Tier::host)] + host.used(Kind::other) + largest_update;
  if (host_needed > host.capacity()) {
    throw OutOfMemory("host: an update brings " + format_bytes(largest_update) + " of chunks to the host beside " +
                          format_bytes(rested_[index_of(Tier::host)]) + " that rest there and " +
                          format_bytes(host.used(Kind::other)) + " of staging and other use, in a budget of " +
                          format_bytes(host.capacity()),
                      "raise host.memory to at least " + format_bytes_exactly(host_needed) +
                          ", lower placement.chunk, or let less rest on the host");
  }
  const Budget& device = memory_.budget(Tier::device);
  const std::uint64_t chunks_needed = rested_[index_of(Tier::device)] + largest_on_device;
  const std::uint64_t device_needed = chunks_needed + device.used(Kind::buffer);
  if (device_needed > device.capacity() || chunks_needed > memory_.device_chunk_limit()) {
    const bool limited = device_needed <= device.capacity();
    throw OutOfMemory("device: the largest chunk of " + format_bytes(largest_on_device) + " does not fit beside " +
                          format_bytes(rested_[index_of(Tier::device)]) + " of chunks that rest there and " +
                          format_bytes(device.used(Kind::buffer)) + " of buffers, in " +
                          (limited ? "device.chunks of " + format_bytes(memory_.device_chunk_limit())
                                   : "device.memory of " + format_bytes(device.capacity())),
                      std::string("raise ") + (limited ? "device.chunks" : "device.memory") + " to at least " +
                          format_bytes_exactly(limited ? chunks_needed : device_needed) +
                          (limited ? "" : ", and more for activations") + ", or lower placement.chunk");
  }
}

void SessionState::restore_storages() {
  std::vector<std::shared_ptr<ManagedStorage>> storages;
  std::uint64_t bytes = 0;
  std::vector<bool> used;
  for (ManagedParameter& parameter : parameters_) {
    parameter.accumulator.reset();  // it holds the tensor too
    used.push_back(parameter.tensor.use_count() > 1 || parameter.tensor.storage().use_count() > 1);
    if (!used.back()) {
      parameter.tensor.mutable_grad().reset();
    }
  }
  {
    const std::scoped_lock lock(registry_->mutex);
    const auto add = [&](const std::shared_ptr<ManagedStorage>& storage) {
      if (storage && storage->storage() != nullptr) {
        bytes += storage->storage()->nbytes();
        storages.push_back(storage);
      }
    };
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (used[i]) {
        add(parameters_[i].storage);
      }
      add(parameters_[i].gradient.lock());  // the program may hold it longer than the parameter
    }
  }
  const std::uint64_t available = available_memory_bytes();
  if (bytes > available - available / 10) {
    throw OutOfMemory("they take " + format_bytes(bytes) + ", and " + format_bytes(available) + " are available");
  }
  for (const auto& storage : storages) {
    restore(*storage);
  }
}

void SessionState::restore(ManagedStorage& storage) {
  std::uint64_t bytes = 0;
  {
    const std::scoped_lock lock(registry_->mutex);
    bytes = storage.storage() != nullptr ? storage.storage()->nbytes() : 0;
  }
  c10::DataPtr data = allocate_ordinary(bytes);
  auto* destination = static_cast<std::byte*>(data.mutable_get());
  const std::array accesses{Access{storage.chunk(), Tier::host, AccessMode::read}};
  const Pin pin = memory_.stream().acquire(accesses);
  for (std::uint64_t done = 0; done < bytes;) {
    const std::span<std::byte> piece = pin.host_bytes(0, storage.offset_bytes() + done);
    const std::uint64_t length = std::min<std::uint64_t>(piece.size(), bytes - done);
    std::memcpy(destination + done, piece.data(), length);
    done += length;
  }
  const std::scoped_lock lock(registry_->mutex);
  if (storage.storage() != nullptr) {
    storage.detach(std::move(data));
  }
}

}  // namespace terrace
