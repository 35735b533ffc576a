#include "integration/checkpoint_reader.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "integration/checkpoint_checksum.h"

namespace terrace {
namespace {

CorruptData corrupt(const std::filesystem::path& file, const std::string& why) {
  return CorruptData("checkpoint: " + file.string() + why,
                     "load another checkpoint, or restore the folder from a copy");
}

}  // namespace

CheckpointReader::CheckpointReader(CheckpointFiles& files, const std::filesystem::path& folder)
    : folder_(files, folder) {
  std::optional<std::string> text = folder_.manifest_text();
  for (std::optional<CheckpointFile> data; !data;) {
    if (!text) {
      throw ConfigError("checkpoint: there is none in " + folder.string(), "name a folder that was saved to");
    }
    manifest_ = parse_manifest(*text, folder_.manifest_path());
    data = files.open(folder / manifest_.data_file);
    if (data) {
      data_ = std::move(*data);
      continue;
    }
    // A save may have taken its place meanwhile.
    std::optional<std::string> now = folder_.manifest_text();
    if (now == text) throw corrupt(folder / manifest_.data_file, " is missing");
    text = std::move(now);
  }
  if (const std::uint64_t bytes = files.size(data_); bytes < manifest_.data_bytes) {
    throw corrupt(data_.path(),
                  " is truncated: it has " + std::to_string(bytes) + " B of " + std::to_string(manifest_.data_bytes));
  }
}

void CheckpointReader::read(const CheckpointRecord& record, const Place& place) const {
  CheckpointChecksum checksum;
  for (std::uint64_t done = 0; done < record.bytes;) {
    std::span<std::byte> piece = place(done);
    if (piece.empty()) {
      throw LogicError(
          "checkpoint: there is no place for the bytes from " + std::to_string(done) + " of the " + describe(record),
          "give one for each byte of the record");
    }
    piece = piece.first(static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), record.bytes - done)));
    if (folder_.files().read(data_, record.offset + done, piece) < piece.size()) {
      throw corrupt(data_.path(), " is truncated: it ends within the " + describe(record));
    }
    checksum.add(piece);
    done += piece.size();
  }
  if (checksum.value() != record.checksum) {
    throw corrupt(data_.path(), " is corrupt: the " + describe(record) + ", " + std::to_string(record.bytes) +
                                    " B at offset " + std::to_string(record.offset) +
                                    ", is not what was saved (checksum)");
  }
}

void CheckpointReader::verify(const CheckpointRecord& record) const {
  // Small enough for the stack: a session may have no room to spare on the host.
  std::array<std::byte, 16 * 1024> buffer;
  read(record, [&](std::uint64_t) { return std::span(buffer); });
}

}  // namespace terrace
