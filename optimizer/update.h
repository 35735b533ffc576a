/// One optimizer step over managed chunks, in parts: the norm, and one update for each set of chunks.
///
/// Not thread-safe: UpdateQueue runs one part at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memory/access_stream.h"
#include "optimizer/adamw.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// The chunks of one index: the same parameters at the same element offsets, and what they hold of each.
struct ChunkSet {
  ElementType type = ElementType::float32;  ///< of parameters and gradients
  StateFormat states = StateFormat::float32;
  ChunkId parameter = 0;
  std::optional<ChunkId> gradient;
  std::optional<ChunkId> master;  ///< only where the parameter is not fp32
  std::optional<ChunkId> momentum;
  std::optional<ChunkId> variance;
};

/// A run of elements of one parameter in one chunk, as it is at `step()`.
struct Segment {
  ChunkSet chunks{};
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;
  AdamWOptions options{};
  std::int64_t step = 0;  ///< counts this update; the first begins with states of zeros
  /// Keeps the gradient's bytes alive until they have been used. Released by whichever thread updates.
  std::shared_ptr<const void> gradient;
};

/// A copy of all that an update needs.
struct UpdateJob {
  std::vector<Segment> segments;  ///< those with a gradient, in parameter order
  double max_gradient_norm = 0;   ///< 0: gradients are not clipped
};

class QueuedUpdate {
 public:
  /// Both outlive it.
  QueuedUpdate(AccessStream& stream, const UpdateThreads& threads, UpdateJob job);

  /// Sets of chunks with something to update, in the order in which the program needs them next.
  std::size_t size() const noexcept { return items_.size(); }
  const ChunkSet& chunks(std::size_t item) const { return items_[item].chunks; }
  /// What the update of a set uses on the host.
  const std::vector<ChunkAccess>& accesses(std::size_t item) const { return items_[item].accesses; }
  bool clips() const noexcept { return max_gradient_norm_ > 0; }

  /// Reads all gradients. Before any update, where gradients are clipped. Throws what AccessStream::acquire throws.
  /// `origin`: whether the thread is one of the program's.
  void find_norm(AccessOrigin origin);
  std::optional<double> norm() const noexcept { return norm_; }
  /// Updates the set and lets go of its gradients. Throws what AccessStream::acquire throws; nothing of the set has
  /// changed then.
  void update(std::size_t item, AccessOrigin origin);

 private:
  struct Item {
    ChunkSet chunks;
    std::vector<ChunkAccess> accesses;
    std::vector<std::pair<std::size_t, Segment>> segments;  ///< with their positions in parameter order
  };

  void update(const Item& item, const Pin& pin) const;

  AccessStream& stream_;
  const UpdateThreads& threads_;
  std::vector<Item> items_;
  std::size_t segment_count_;
  double max_gradient_norm_;
  std::optional<double> norm_;
  float scale_ = 1.0f;
};

}  // namespace terrace
