// How a module's tensors become ordinary again when their session ends.

#include <map>

#include "base/error.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/byte_copies.h"
#include "integration/pinned_run.h"
#include "integration/session_state.h"

namespace terrace {

void SessionState::restore_storages() {
  restore(spillable_.away());  // before anything that may fail on behalf of others
  require_whole();
  std::vector<std::shared_ptr<ManagedStorage>> storages = left_behind_;
  for (ManagedParameter& parameter : parameters_) {
    if (parameter.tensor.use_count() > 1 || parameter.tensor.storage().use_count() > 1) {
      storages.push_back(parameter.storage);
    } else {
      parameter.tensor.mutable_grad().reset();
    }
    if (const auto gradient = parameter.gradient.lock()) {  // the program may hold it longer than the parameter
      storages.push_back(gradient);
    }
  }
  restore(storages);
}

void SessionState::restore(const std::vector<std::shared_ptr<ManagedStorage>>& storages) {
  std::uint64_t bytes_on_cpu = 0;
  std::uint64_t bytes_on_device = 0;  // one that is not the CPU
  {
    const std::scoped_lock lock(registry_->mutex);
    for (const auto& managed : storages) {
      if (const c10::StorageImpl* const storage = managed->storage()) {
        (storage->device().is_cpu() ? bytes_on_cpu : bytes_on_device) += storage->nbytes();
      }
    }
  }
  const std::uint64_t available = available_memory_bytes();
  if (bytes_on_cpu > available - available / 10) {
    throw OutOfMemory("they take " + format_bytes(bytes_on_cpu) + ", and " + format_bytes(available) +
                      " are available");
  }
  if (const std::uint64_t free = free_for_the_program(); bytes_on_device > free) {
    throw OutOfMemory("they take " + format_bytes(bytes_on_device) + ", and device.memory leaves " +
                      format_bytes(free));
  }
  std::map<ChunkId, std::vector<std::shared_ptr<ManagedStorage>>> by_chunk;
  for (const auto& storage : storages) {
    by_chunk[storage->chunk()].push_back(storage);
  }
  std::exception_ptr first_error;
  for (const auto& [chunk, members] : by_chunk) {
    try {
      restore_chunk(chunk, members);
    } catch (...) {
      first_error = first_error ? first_error : std::current_exception();
    }
  }
  if (first_error) {
    std::rethrow_exception(first_error);
  }
}

std::uint64_t SessionState::free_for_the_program() const {
  const Budget& device = memory_.budget(Tier::device);
  return device.capacity() - (device.used() - memory_.stream().inspect([](const Policy& policy) {
           return policy.chunk_bytes(Tier::device);
         }));
}

void SessionState::restore_chunk(ChunkId chunk, const std::vector<std::shared_ptr<ManagedStorage>>& storages) {
  if (memory_.program_device().is_cpu()) {
    for (const auto& storage : storages) {
      restore(*storage);
    }
    return;
  }
  std::uint64_t bytes = 0;
  {
    const std::scoped_lock lock(registry_->mutex);
    for (const auto& managed : storages) {
      const c10::StorageImpl* const storage = managed->storage();
      bytes += storage != nullptr && !storage->device().is_cpu() ? storage->nbytes() : 0;
    }
  }
  memory_.make_room_outside(bytes);  // counted until the session's memory ends as a whole
  for (const auto& storage : storages) {
    restore(*storage);
  }
  memory_.stream().remove_chunk(chunk);  // and its room on the device, for the next
}

void SessionState::restore(ManagedStorage& storage) {
  std::uint64_t bytes = 0;
  c10::Device device = at::kCPU;
  {
    const std::scoped_lock lock(registry_->mutex);
    if (storage.storage() != nullptr) {
      bytes = storage.storage()->nbytes();
      device = storage.storage()->device();
    }
  }
  restore(storage, allocate_ordinary(bytes, device));
}

void SessionState::restore(ManagedStorage& storage, c10::DataPtr data) {
  std::uint64_t bytes = 0;
  {
    const std::scoped_lock lock(registry_->mutex);
    bytes = storage.storage() != nullptr ? storage.storage()->nbytes() : 0;
  }
  read_run(storage, bytes, data);
  const std::scoped_lock lock(registry_->mutex);
  if (storage.storage() != nullptr) {
    storage.detach(std::move(data));
  }
}

void SessionState::read_run(const ManagedStorage& storage, std::uint64_t bytes, const c10::DataPtr& data) {
  auto* const destination = static_cast<std::byte*>(data.get());
  const std::array accesses{ChunkAccess{storage.chunk(), Tier::host, Access::read}};
  const Pin pin = memory_.stream().acquire(accesses);
  visit_pinned_run(pin, storage.offset_bytes(), bytes, [&](std::span<const std::byte> piece, std::uint64_t done) {
    copy_bytes(destination + done, data.device(), piece.data(), at::kCPU, piece.size());
  });
}

}  // namespace terrace
