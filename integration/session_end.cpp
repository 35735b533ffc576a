// How a module's tensors become ordinary again when their session ends.

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
  std::uint64_t bytes = 0;
  {
    const std::scoped_lock lock(registry_->mutex);
    for (const auto& storage : storages) {
      bytes += storage->storage() != nullptr ? storage->storage()->nbytes() : 0;
    }
  }
  const std::uint64_t available = available_memory_bytes();
  if (bytes > available - available / 10) {
    throw OutOfMemory("they take " + format_bytes(bytes) + ", and " + format_bytes(available) + " are available");
  }
  std::exception_ptr first_error;
  for (const auto& storage : storages) {
    try {
      restore(*storage);
    } catch (...) {
      first_error = first_error ? first_error : std::current_exception();
    }
  }
  if (first_error) {
    std::rethrow_exception(first_error);
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
