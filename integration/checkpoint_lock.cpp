#include "integration/checkpoint_lock.h"

#include <utility>

#include "base/error.h"

namespace terrace {

CheckpointLock::CheckpointLock(CheckpointFiles& files, const std::filesystem::path& folder) : folder_(files, folder) {
  folder_.require_own();  // before anything is made in it
  files.make_folder(folder);
  std::optional<CheckpointFile> file = files.lock(folder_.lock_path());
  if (!file) {
    throw ConfigError("checkpoint: another process is saving to " + folder.string(),
                      "give each run a folder of its own");
  }
  file_ = std::move(*file);
}

}  // namespace terrace
