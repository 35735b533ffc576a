/// One optimizer step over managed chunks, in parts: the norm, and one update for each set of chunks.
///
/// Not thread-safe: UpdateQueue runs one part at a time.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/access_stream.h"
#include "optimizer/element_type.h"
#include "optimizer/gradient_report.h"
#include "optimizer/gradient_sums.h"
#include "optimizer/non_finite.h"
#include "optimizer/state_format.h"
#include "optimizer/update_rule.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// The chunks of one index: the same parameters at the same element offsets, and what they hold of each.
struct ChunkSet {
  ElementType type = ElementType::float32;  ///< of parameters
  ElementType gradient_type = ElementType::float32;
  StateFormat states = StateFormat::float32;
  ChunkId parameter = 0;
  std::optional<ChunkId> gradient;
  std::optional<ChunkId> master;  ///< only where the parameter is not fp32
  std::optional<ChunkId> momentum;
  std::optional<ChunkId> variance;  ///< only where an optimizer keeps one
};

/// A run of elements of one parameter in one chunk, as it is at `step()`.
struct Segment {
  ChunkSet chunks{};
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;
  std::shared_ptr<const UpdateRule> rule;
  /// Updates of these elements so far, without skipped ones: it goes up when it is sure that this one will be. The
  /// first begins with states of zeros. Read by others once the job is finished.
  std::shared_ptr<std::int64_t> updates;
  std::string parameter;  ///< its name
  std::size_t group = 0;
  /// Keeps the gradient's bytes alive until they have been used. Released by whichever thread updates.
  std::shared_ptr<const void> gradient;
};

/// A copy of all that an update needs.
struct UpdateJob {
  std::vector<Segment> segments;  ///< those with a gradient, in parameter order
  std::size_t groups = 1;
  double max_gradient_norm = 0;  ///< 0: gradients are not clipped; infinite: the norm is found all the same
  double loss_scale = 1;         ///< what gradients are to be divided by, before anything else
  NonFinite non_finite = NonFinite::pass;
  std::int64_t step = 0;                   ///< of the optimizer, from 1 on
  std::shared_ptr<GradientReport> report;  ///< what learns of the norms, where they are found; may be null

  bool needs_norm() const noexcept { return max_gradient_norm > 0 || non_finite != NonFinite::pass; }
};

class QueuedUpdate {
 public:
  /// All outlive it. `sums`: of what need not be read for the norm.
  QueuedUpdate(AccessStream& stream, const UpdateThreads& threads, const GradientSums& sums, UpdateJob job);

  /// Sets of chunks with something to update, in the order in which the program needs them next.
  std::size_t size() const noexcept { return items_.size(); }
  const ChunkSet& chunks(std::size_t item) const { return items_[item].chunks; }
  /// What the update of a set uses on the host.
  const std::vector<ChunkAccess>& accesses(std::size_t item) const { return items_[item].accesses; }
  /// Whether updates have to wait for `find_norm`.
  bool needs_norm() const noexcept { return job_.needs_norm(); }

  /// Whether finding the norm has to read gradients of the set.
  bool reads_for_norm(std::size_t item) const;
  /// Reads the gradients whose sums are not known, and decides whether the job is skipped. Throws what
  /// AccessStream::acquire throws. `origin`: whether the thread is one of the program's.
  void find_norm(AccessOrigin origin);
  /// Over all parameters, before clipping; nothing where it has not been found.
  std::optional<double> norm() const noexcept { return norm_; }
  /// A NonFiniteGradient that somebody has to hear of, or null.
  const std::exception_ptr& refusal() const noexcept { return refusal_; }
  /// Of the optimizer whose job it is; may be null.
  const GradientReport* report() const noexcept { return job_.report.get(); }
  /// Updates the set, unless the job is skipped, and lets go of its gradients. Throws what AccessStream::acquire
  /// throws; nothing of the set has changed then.
  void update(std::size_t item, AccessOrigin origin);

 private:
  struct Item {
    ChunkSet chunks;
    std::vector<ChunkAccess> accesses;
    std::vector<std::size_t> segments;  ///< positions in parameter order
  };

  void count_updates();
  std::optional<double> known_sum_of(const Segment& segment) const;
  std::vector<double> sums_of_squares_by_segment(AccessOrigin origin);
  std::vector<double> norms_by_group(std::span<const double> sums_of_squares) const;
  void update(const Item& item, const Pin& pin) const;

  AccessStream& stream_;
  const UpdateThreads& threads_;
  const GradientSums& sums_;
  UpdateJob job_;
  std::vector<std::int64_t> counts_;  ///< by segment: the updates, with this one
  std::vector<Item> items_;
  std::optional<double> norm_;
  float scale_;  ///< of gradients
  bool is_skipped_ = false;
  std::exception_ptr refusal_;
};

}  // namespace terrace
