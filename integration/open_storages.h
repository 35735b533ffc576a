/// Managed storages whose bytes are on the device and can be reached, for as long as this lives.
///
/// Threads: made, ended and destroyed by any thread, by one at a time.
#pragma once

#include <memory>
#include <vector>

#include <c10/util/SmallVector.h>

#include "integration/managed_storage.h"
#include "integration/spillable_storages.h"
#include "memory/access_stream.h"

namespace terrace {

class OpenStorages {
 public:
  using Storages = c10::SmallVector<std::shared_ptr<ManagedStorage>, 4>;  // few ops have more

  /// `pin` holds, at the position of each storage, that storage's chunk on the device; `held` are ordinary ones that
  /// could leave the host.
  OpenStorages(std::shared_ptr<StorageRegistry> registry, Pin pin, Storages storages,
               std::vector<SpillableStorages::Hold> held = {});
  ~OpenStorages() { end(); }
  OpenStorages(const OpenStorages&) = delete;
  OpenStorages& operator=(const OpenStorages&) = delete;

  /// Closes them and gives up the pin. Nothing the second time.
  void end() noexcept;

  const Storages& storages() const noexcept { return storages_; }

 private:
  const std::shared_ptr<StorageRegistry> registry_;
  Pin pin_;
  Storages storages_;
  std::vector<SpillableStorages::Hold> held_;
};

}  // namespace terrace
