/// Managed storages whose bytes are on the device and can be reached, for as long as this lives.
///
/// Threads: made, ended and destroyed by any thread, by one at a time.
#pragma once

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <c10/util/SmallVector.h>

#include "integration/managed_storage.h"
#include "integration/spillable_storages.h"
#include "memory/access_stream.h"

namespace terrace {

class OpenStorages {
 public:
  using Storages = c10::SmallVector<std::shared_ptr<ManagedStorage>, 4>;  // few ops have more

  explicit OpenStorages(AccessStream& stream) : stream_(stream) {}
  ~OpenStorages() { end(); }
  OpenStorages(const OpenStorages&) = delete;
  OpenStorages& operator=(const OpenStorages&) = delete;

  /// Before `open`: what that is to open.
  void add(ManagedStorage& storage, Access mode);
  /// An ordinary storage that could leave the host stays, until the end.
  void keep(SpillableStorages::Hold hold) { kept_.push_back(std::move(hold)); }
  /// Has the chunks brought to the device, pins them there and opens the storages. Throws as AccessStream::acquire
  /// does, or what an op was refused with that runs on one of them and does not fail soon; then none is open.
  void open(AccessOrigin origin);
  /// Closes them and gives up the pins. Nothing the second time.
  void end() noexcept;

  const Storages& storages() const noexcept { return storages_; }

 private:
  /// Null once they are open.
  std::exception_ptr open_storages_or_refusal();

  AccessStream& stream_;
  Storages storages_;
  c10::SmallVector<ChunkAccess, 4> accesses_;      ///< of each
  c10::SmallVector<const ChunkPlace*, 4> places_;  ///< of each, while it is open
  std::vector<SpillableStorages::Hold> kept_;
  bool is_open_ = false;
};

}  // namespace terrace
