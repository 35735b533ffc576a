// How a module's tensors become ordinary again when their session ends.

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/session_state.h"

namespace terrace {

void SessionState::restore_storages() {
  require_whole();
  std::vector<std::shared_ptr<ManagedStorage>> storages;
  std::uint64_t bytes = 0;
  std::vector<bool> used;
  for (ManagedParameter& parameter : parameters_) {
    used.push_back(parameter.tensor.use_count() > 1 || parameter.tensor.storage().use_count() > 1);
    if (!used.back()) {
      parameter.tensor.mutable_grad().reset();
    }
  }
  const std::vector<std::shared_ptr<ManagedStorage>> spilled = spillable_.away();
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
    for (const auto& run : spilled) {
      add(run);
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
  restore(storage, allocate_ordinary(bytes));
}

void SessionState::restore(ManagedStorage& storage, c10::DataPtr data) {
  std::uint64_t bytes = 0;
  {
    const std::scoped_lock lock(registry_->mutex);
    bytes = storage.storage() != nullptr ? storage.storage()->nbytes() : 0;
  }
  auto* destination = static_cast<std::byte*>(data.mutable_get());
  const std::array accesses{ChunkAccess{storage.chunk(), Tier::host, Access::read}};
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
