/// What a run has learned of a model, kept for the next.
///
/// How a program uses a model shows only while it runs, and by then its chunks have their places. The first run goes by
/// what is usual; the next ones by what the one before has seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "integration/managed_parameter.h"

namespace terrace {

struct ModelNotes {
  /// Whether a step writes a gradient once and reads it once, as it has one backward, and updates behind it: then a
  /// gradient on NVMe costs less than states there, which are read and written between `step` and their next use.
  bool gradients_read_once = false;
  /// Where that is so: what the shortest step computed (StepClock), in seconds; 0 where that is not known.
  double forward_seconds = 0;
  double backward_seconds = 0;
  /// The model's parameters, by their positions in it, in the order in which a step first used them. Empty where chunks
  /// in that order would be no better than chunks in the order of construction; then what follows is 0.
  std::vector<std::uint32_t> order{};
  /// What the device needs at most at one moment with chunks in the order of construction, and how many parameters and
  /// gradients one op has used at most: in another order these may lie in a chunk each.
  std::uint64_t device_bytes = 0;
  std::uint64_t most_operands = 0;

  /// What the device may need more at one moment with chunks of at most so many bytes in another order: operands in a
  /// chunk each, and, as what rests there does so by whole chunks, one of each kind.
  std::uint64_t more_in_another_order(std::uint64_t chunk_bytes) const noexcept {
    constexpr std::uint64_t kinds = 5;  // parameter, gradient, master, momentum, variance
    return (most_operands + kinds) * chunk_bytes;
  }

  bool operator==(const ModelNotes&) const = default;
};

/// One model's notes, in a file of their own.
class ModelNotesFile {
 public:
  /// models/KEY.json in the user's cache folder (see user_cache.h). The model is known by the names, types and shapes
  /// of its parameters. Where there is no such folder, nothing is kept.
  explicit ModelNotesFile(std::span<const ManagedParameter> model);
  ModelNotesFile(std::filesystem::path path, std::size_t parameters)
      : path_(std::move(path)), parameters_(parameters) {}

  /// What was saved last, or nothing. A file that is broken or of another version is removed, with a line in the log.
  /// Never throws because of the file.
  std::optional<ModelNotes> load() const;

  /// Replaces the file at once. Where it cannot be written a warning says so, and nothing else happens.
  void save(const ModelNotes& notes) const;

 private:
  std::filesystem::path path_;
  std::size_t parameters_;  ///< of the model
};

}  // namespace terrace
