/// Reads a checkpoint, and believes no byte of it unchecked.
///
/// Holds the data file open, so that a save to the same folder changes nothing of what it reads. Not thread-safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>

#include "integration/checkpoint_folder.h"

namespace terrace {

class CheckpointReader {
 public:
  /// Throws ConfigError if there is no checkpoint, or one of another version or program; CorruptData if the manifest
  /// is corrupt or the data file missing or too short; IoError.
  CheckpointReader(CheckpointFiles& files, const std::filesystem::path& folder);

  const CheckpointManifest& manifest() const noexcept { return manifest_; }

  /// Where the bytes from `offset` of a record go: as many as follow each other there, one at least.
  using Place = std::function<std::span<std::byte>(std::uint64_t offset)>;
  /// Reads the record piece by piece. Throws CorruptData, naming it, where its bytes are not those that were saved: all
  /// of them have been handed over by then; IoError; LogicError if there is no place for its bytes.
  void read(const CheckpointRecord& record, const Place& place) const;
  /// Reads the record to check it.
  void verify(const CheckpointRecord& record) const;

 private:
  CheckpointFolder folder_;
  CheckpointManifest manifest_;
  CheckpointFile data_;
};

}  // namespace terrace
