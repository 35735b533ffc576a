#include "integration/checkpoint_lock.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace terrace {
namespace {

[[noreturn]] void fail_as_replaced(const CheckpointFolder& folder, const std::string& reason) {
  throw IoError(
      "checkpoint: " + folder.path().string() + " is not the folder any more that was locked for saving" + reason,
      "leave the folder, and the lock in it, where they are while a run saves there");
}

}  // namespace

CheckpointLock::CheckpointLock(CheckpointFiles& files, const std::filesystem::path& folder) : folder_(files, folder) {
  std::optional<CheckpointFile> file = take();
  if (!file) {
    throw ConfigError("checkpoint: another process is saving to " + folder.string(),
                      "give each run a folder of its own");
  }
  file_ = std::move(*file);
}

std::optional<CheckpointFile> CheckpointLock::take() const {
  folder_.require_own();  // before anything is made in it
  folder_.files().make_folder(folder_.path());
  return folder_.files().lock(folder_.lock_path());
}

void CheckpointLock::renew() {
  if (is_held()) return;
  std::optional<CheckpointFile> file;
  try {
    file = take();
  } catch (const ConfigError& error) {
    fail_as_replaced(folder_, ": " + error.message());
  }
  if (!file) fail_as_replaced(folder_, ": another process is saving to it");
  if (folder_.manifest_text()) fail_as_replaced(folder_, ": it holds a checkpoint");
  file_ = std::move(*file);
  log(LogLevel::warning,
      "checkpoint: " + folder_.path().string() + " has been removed or moved meanwhile, and was made again");
}

void CheckpointLock::require_held() const {
  if (!is_held()) fail_as_replaced(folder_, "");
}

}  // namespace terrace
