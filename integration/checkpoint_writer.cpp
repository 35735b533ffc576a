#include "integration/checkpoint_writer.h"

#include <random>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace terrace {
namespace {

std::string new_data_file_name() {
  std::random_device random;
  const std::uint64_t high = random();
  return "data." + to_hex(high << 32U | random());
}

CheckpointFile lock_for_saving(const CheckpointFolder& folder) {
  folder.require_own();  // before anything is made in it
  folder.files().make_folder(folder.path());
  std::optional<CheckpointFile> lock = folder.files().lock(folder.lock_path());
  if (!lock) {
    throw ConfigError("checkpoint: another process is saving to " + folder.path().string(),
                      "give each run a folder of its own");
  }
  folder.require_own();  // now that nobody else changes it
  return std::move(*lock);
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointFiles& files, const std::filesystem::path& folder)
    : folder_(files, folder), lock_(lock_for_saving(folder_)) {
  // What a save that was killed has left would take the room of this one.
  folder_.remove_leftovers();
  manifest_.data_file = new_data_file_name();
  data_ = files.create(folder / manifest_.data_file);
}

CheckpointWriter::~CheckpointWriter() {
  if (state_ != State::done) remove_written();
}

void CheckpointWriter::remove_written() noexcept {
  try {
    // A rename that is said to have failed may have been done.
    if (state_ == State::renaming) {
      const std::optional<CheckpointManifest> manifest = folder_.manifest();
      if (manifest && manifest->data_file == manifest_.data_file) return;
    }
    folder_.files().remove(folder_.path() / manifest_.data_file);
    folder_.files().remove(folder_.next_manifest_path());
  } catch (const std::exception& error) {
    log(LogLevel::warning, error.what());
  }
}

void CheckpointWriter::begin(CheckpointRecord record) {
  end_record();
  const std::uint64_t end = manifest_.data_bytes;
  record.offset = (end + checkpoint_alignment - 1) / checkpoint_alignment * checkpoint_alignment;
  record.bytes = 0;
  manifest_.data_bytes = record.offset;
  manifest_.records.push_back(std::move(record));
  checksum_ = {};
}

void CheckpointWriter::append(std::span<const std::byte> bytes) {
  folder_.files().write(data_, manifest_.data_bytes, bytes);
  checksum_.add(bytes);
  manifest_.records.back().bytes += bytes.size();
  manifest_.data_bytes += bytes.size();
}

void CheckpointWriter::end_record() {
  if (!manifest_.records.empty()) manifest_.records.back().checksum = checksum_.value();
}

void CheckpointWriter::commit(const CheckpointNotes& notes) {
  end_record();
  manifest_.notes = notes;
  const std::string text = to_text(manifest_);
  CheckpointFiles& files = folder_.files();
  files.sync(data_);
  files.sync_folder(folder_.path());  // the data file has its name before a manifest names it
  {
    const CheckpointFile next = files.create(folder_.next_manifest_path());
    files.write(next, 0, std::as_bytes(std::span(text)));
    files.sync(next);
  }
  state_ = State::renaming;
  files.rename(folder_.next_manifest_path(), folder_.manifest_path());
  state_ = State::done;
  folder_.remove_leftovers();
}

void require_can_save(const std::filesystem::path& folder) {
  const CheckpointWriter writer(checkpoint_files(), folder);
}

}  // namespace terrace
