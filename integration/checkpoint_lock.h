/// A checkpoint's folder that nobody else saves to for as long as this lives.
///
/// One save takes it for itself. Who saves again and again to one folder takes it once, before the work: another
/// process that would save there is then refused at its start, and nothing that others do there makes a save fail, but
/// for a folder put in its place.
/// Any thread; one at a time.
#pragma once

#include <filesystem>
#include <optional>

#include "integration/checkpoint_folder.h"

namespace terrace {

class CheckpointLock {
 public:
  /// Makes the folder where it is missing. Throws ConfigError if it holds something else than a checkpoint, or another
  /// process saves there, and IoError.
  CheckpointLock(CheckpointFiles& files, const std::filesystem::path& folder);

  const CheckpointFolder& folder() const noexcept { return folder_; }

  /// Makes the folder again, and locks that, where it has been removed or moved meanwhile. Throws IoError, naming it,
  /// if there is one in its place that is in use: it holds something, or another process saves there.
  void renew();

  /// Throws IoError, naming the folder, if it is no longer the one that was locked.
  void require_held() const;

 private:
  bool is_held() const { return folder_.files().is_in_place(file_); }
  /// Nothing if another process has the lock.
  std::optional<CheckpointFile> take() const;

  CheckpointFolder folder_;
  CheckpointFile file_;
};

}  // namespace terrace
