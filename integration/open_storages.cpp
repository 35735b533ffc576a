#include "integration/open_storages.h"

#include <utility>

namespace terrace {

OpenStorages::OpenStorages(std::shared_ptr<StorageRegistry> registry, Pin pin, Storages storages,
                           std::vector<SpillableStorages::Hold> held)
    : registry_(std::move(registry)), pin_(std::move(pin)), storages_(std::move(storages)), held_(std::move(held)) {
  const std::scoped_lock lock(registry_->mutex);
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    storages_[i]->open(pin_.device(i));
  }
}

void OpenStorages::end() noexcept {
  {
    const std::scoped_lock lock(registry_->mutex);
    for (const auto& storage : storages_) {
      storage->close();
    }
  }
  storages_.clear();
  held_.clear();
  pin_.release();
}

}  // namespace terrace
