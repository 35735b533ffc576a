/// Saves a checkpoint: records one after another, and at last the manifest that makes them one.
///
/// Until `commit` has put the manifest in its place, and whenever the process or the machine ends before, the folder
/// holds the checkpoint that it held. A writer that ends without a commit removes what it has written. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>

#include "integration/checkpoint_checksum.h"
#include "integration/checkpoint_folder.h"
#include "integration/checkpoint_lock.h"

namespace terrace {

class CheckpointWriter {
 public:
  /// Makes the folder where it is missing. Throws ConfigError if it is not a checkpoint's, or another process saves
  /// there, and IoError.
  CheckpointWriter(CheckpointFiles& files, const std::filesystem::path& folder);
  /// The lock, which is held already, outlives it. Renews it.
  explicit CheckpointWriter(CheckpointLock& lock);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Begins a record, which has all but offset, bytes and checksum. The one before ends.
  void begin(CheckpointRecord record);
  /// More bytes of the record.
  void append(std::span<const std::byte> bytes);
  /// Returns when the checkpoint lasts. Throws IoError, which says so where the checkpoint is in its place already;
  /// ConfigError if a name or a note is not UTF-8.
  void commit(const CheckpointNotes& notes);

 private:
  void start();
  void end_record();
  void remove_written() noexcept;

  std::optional<CheckpointLock> own_lock_;
  CheckpointLock& lock_;
  const CheckpointFolder& folder_ = lock_.folder();
  CheckpointManifest manifest_;
  CheckpointFile data_;
  CheckpointChecksum checksum_;
  enum class State : std::uint8_t { writing, renaming, done } state_ = State::writing;
};

/// Throws what a save into the folder would throw before it writes: for those who save after much work.
void require_can_save(CheckpointLock& lock);

}  // namespace terrace
