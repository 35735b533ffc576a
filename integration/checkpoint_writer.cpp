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

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointFiles& files, const std::filesystem::path& folder)
    : own_lock_(std::in_place, files, folder), lock_(*own_lock_) {
  start();
}

CheckpointWriter::CheckpointWriter(CheckpointLock& lock) : lock_(lock) {
  lock_.renew();
  start();
}

void CheckpointWriter::start() {
  // What a save that was killed has left would take the room of this one.
  folder_.remove_leftovers();
  manifest_.data_file = new_data_file_name();
  data_ = folder_.files().create(folder_.path() / manifest_.data_file);
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
  files.resize(data_, manifest_.data_bytes);  // an empty record at the end has written nothing up to its place
  files.sync(data_);
  files.sync_folder(folder_.path());  // the data file has its name before a manifest names it
  lock_.require_held();               // or the manifest would come into another folder than the data
  {
    const CheckpointFile next = files.create(folder_.next_manifest_path());
    files.write(next, 0, std::as_bytes(std::span(text)));
    files.sync(next);
  }
  state_ = State::renaming;
  files.rename(folder_.next_manifest_path(), folder_.manifest_path());
  state_ = State::done;
  try {
    files.sync_folder(folder_.path());  // the one before is kept until this one is sure to last
  } catch (const IoError& error) {
    throw IoError("checkpoint: it was saved to " + folder_.path().string() +
                      ", but may be lost should the machine fail: " + error.message(),
                  error.hint());
  }
  folder_.remove_all_but(manifest_.data_file);
}

void require_can_save(CheckpointLock& lock) { const CheckpointWriter writer(lock); }

}  // namespace terrace
