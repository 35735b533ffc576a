/// Text to learn: the bytes of files and folders, each byte a token.
///
/// Files are put one after another in a shuffled order, the same in every run, and the last 5% of the bytes are held
/// out: files of all folders, not only those whose names come last. Which bytes are drawn for training
/// depends on the caller's generator only, never on LibTorch's, so two runs with one seed see the same data.
///
/// Immutable; thread-safe. The bytes are the only copy it keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace terrace {

/// Tokens and the token that follows each: int64 [sequences, sequence].
struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

class Dataset {
 public:
  /// Reads files as they are, and of folders, recursively, the files that look like text (no zero byte in the first
  /// 4 KiB). Reads `most_bytes` at most, and logs it if there are more. `sequence` is the tokens of one sequence.
  /// Throws ConfigError for a path that is missing or cannot be read, and for too few bytes to learn one sequence and
  /// hold out another.
  Dataset(const std::vector<std::filesystem::path>& paths, std::int64_t sequence,
          std::uint64_t most_bytes = default_most_bytes);

  static constexpr std::uint64_t default_most_bytes = std::uint64_t{256} << 20;

  /// Sequences that begin anywhere in the bytes that are not held out.
  Batch training_batch(std::mt19937_64& generator, std::int64_t sequences) const;

  /// Part `index` of `count` of the held-out bytes: sequences that do not overlap, spread evenly.
  /// `count * sequences` may be at most `held_out_sequences()`.
  Batch held_out_batch(std::int64_t index, std::int64_t count, std::int64_t sequences) const;

  /// Sequences that the held-out bytes have.
  std::int64_t held_out_sequences() const;

  std::span<const std::uint8_t> training() const { return std::span(bytes_).first(training_bytes_); }
  std::span<const std::uint8_t> held_out() const { return std::span(bytes_).subspan(training_bytes_); }
  std::int64_t sequence() const noexcept { return sequence_; }
  /// Of all bytes in their order: what the data are known by.
  std::uint64_t digest() const;

 private:
  Batch batch(std::span<const std::uint8_t> bytes, const std::vector<std::size_t>& begins) const;

  std::vector<std::uint8_t> bytes_;
  std::size_t training_bytes_ = 0;
  std::int64_t sequence_;
};

/// How many bytes of each value there are, for the entropy of what was measured.
class ByteCounts {
 public:
  /// Of int64 tokens below 256.
  void add(const at::Tensor& tokens);

  /// In nats: the loss of a model that knows how often each byte occurs and nothing else. 0 where there are none.
  double entropy() const;

 private:
  std::vector<std::uint64_t> counts_ = std::vector<std::uint64_t>(256);
};

}  // namespace terrace
