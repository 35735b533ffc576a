/// What a checkpoint's data file holds, as the JSON text of `manifest.json`.
///
/// The text begins with a checksum of all that follows its first line. What is read is checked as a whole: records lie
/// one after another in the data file, sizes are those of type and shape, and each parameter that was updated has its
/// states. So whoever has a manifest can trust its numbers; text that says anything else is refused.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "integration/checkpoint_notes.h"

namespace terrace {

/// One run of bytes of the data file.
struct CheckpointRecord {
  enum class Kind : std::uint8_t { parameter, master, momentum, variance, buffer, generator };

  std::string name;
  Kind kind = Kind::parameter;
  std::string dtype;  ///< as `checkpoint_dtype_bytes` knows it
  std::vector<std::int64_t> shape;
  /// In elements. A parameter and its states lie as in memory; a buffer's elements in the order of its shape.
  std::vector<std::int64_t> strides;
  std::uint64_t offset = 0;  ///< a multiple of `checkpoint_alignment`
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  std::int64_t updates = 0;          ///< of a parameter
  std::string updated_by;            ///< where there are any: the optimizer (see optimizer_states.h)
  std::vector<std::string> aliases;  ///< further names of a tied parameter
};

struct CheckpointManifest {
  std::string data_file;         ///< its name in the same folder
  std::uint64_t data_bytes = 0;  ///< where the last record ends
  std::vector<CheckpointRecord> records;
  CheckpointNotes notes;
};

inline constexpr std::uint64_t checkpoint_alignment = 4096;
/// Of what is written. Those before are read too: in the first all states are fp32, in the second all are of AdamW.
inline constexpr int checkpoint_version = 3;
/// Of a manifest's text: a file that is larger is none, and need not be read to know it. Several million records.
inline constexpr std::uint64_t checkpoint_manifest_most_bytes = std::uint64_t{1} << 30;
/// Of all notes together: in a manifest, where a byte may take six, they leave room for the records.
inline constexpr std::uint64_t checkpoint_notes_most_bytes = std::uint64_t{64} << 20;

std::string_view name_of(CheckpointRecord::Kind kind) noexcept;
/// As a message names it: "momentum of 'layer1.weight'".
std::string describe(const CheckpointRecord& record);

/// Bytes of an element of a type such as "float32"; nothing if there is no such type.
std::optional<std::uint64_t> checkpoint_dtype_bytes(std::string_view dtype) noexcept;

/// Throws ConfigError if a note is not UTF-8, or there are more than `checkpoint_notes_most_bytes`.
void require_notes(const CheckpointNotes& notes);

/// Throws ConfigError if a name or a note is not UTF-8.
std::string to_text(const CheckpointManifest& manifest);

/// `file` is what messages name. Throws ConfigError for a manifest of another version, and CorruptData for text that
/// `to_text` cannot have given.
CheckpointManifest parse_manifest(const std::string& text, const std::filesystem::path& file);

/// Whether some part of the text shows that it is, or was, a checkpoint's manifest.
bool looks_like_a_manifest(std::string_view text) noexcept;

/// "data." and 16 hexadecimal digits.
bool is_data_file_name(std::string_view name) noexcept;

}  // namespace terrace
