/// What a run has learned of a model, kept for the next.
///
/// How a program uses a model shows only while it runs, and by then its chunks have their places. The first run goes by
/// what is usual; the next ones by what the one before has seen.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include "integration/managed_parameter.h"

namespace terrace {

struct ModelNotes {
  /// Whether a step writes a gradient once and reads it once, as it has one backward and needs no norm: then a gradient
  /// on NVMe costs less than states there, which are read and written between `step` and their next use.
  bool gradients_read_once = false;

  bool operator==(const ModelNotes&) const = default;
};

/// One model's notes, in a file of their own.
class ModelNotesFile {
 public:
  /// models/KEY.json in the user's cache folder (see user_cache.h). The model is known by the names, types and shapes
  /// of its parameters. Where there is no such folder, nothing is kept.
  explicit ModelNotesFile(std::span<const ManagedParameter> model);
  explicit ModelNotesFile(std::filesystem::path path) : path_(std::move(path)) {}

  /// What was saved last, or nothing. A file that is broken or of another version is removed, with a line in the log.
  /// Never throws because of the file.
  std::optional<ModelNotes> load() const;

  /// Replaces the file at once. Where it cannot be written a warning says so, and nothing else happens.
  void save(const ModelNotes& notes) const;

 private:
  std::filesystem::path path_;
};

}  // namespace terrace
