/// A checkpoint's folder that nobody else saves to for as long as this lives.
///
/// One save takes it for itself. Who saves again and again to one folder takes it once, before the work: another
/// process that would save there is then refused at its start, and nothing that others do there makes a save fail.
/// Any thread; one at a time.
#pragma once

#include <filesystem>

#include "integration/checkpoint_folder.h"

namespace terrace {

class CheckpointLock {
 public:
  /// Makes the folder where it is missing. Throws ConfigError if it holds something else than a checkpoint, or another
  /// process saves there, and IoError.
  CheckpointLock(CheckpointFiles& files, const std::filesystem::path& folder);

  const CheckpointFolder& folder() const noexcept { return folder_; }

 private:
  CheckpointFolder folder_;
  CheckpointFile file_;
};

}  // namespace terrace
