/// The optimizer step over managed chunks, on the host.
///
/// A job is a copy of all that the update needs, taken at `step()`: later changes of options cannot reach it.
/// It brings each chunk's gradient, parameter, master and moments to the host, updates every segment that
/// has a gradient, and leaves the rest to residency. Where clipping is on, a first pass over the gradients
/// gives their norm; sums are taken in parameter coordinates and combined in parameter order, so neither
/// chunks nor budgets change a bit of it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memory/access_stream.h"
#include "optimizer/adamw.h"

namespace terrace {

/// The chunks of one index: the same parameters at the same element offsets.
struct ChunkSet {
  ChunkId parameter = 0;
  std::optional<ChunkId> gradient;
  std::optional<ChunkId> master;  ///< only where the parameter is not fp32
  std::optional<ChunkId> momentum;
  std::optional<ChunkId> variance;
};

/// A run of elements of one parameter in one chunk, as it is at `step()`.
struct Segment {
  std::uint32_t chunk_set = 0;
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;
  AdamWOptions options{};
  std::int64_t step = 0;  ///< counts this update
};

struct UpdateJob {
  std::vector<Segment> segments;  ///< those with a gradient, in parameter order
  double max_gradient_norm = 0;   ///< 0: gradients are not clipped
};

/// Runs the job and waits for it. Returns the gradient norm before clipping, where clipping is on. Throws what
/// AccessStream::acquire throws; what was updated by then stays updated.
std::optional<double> run_update(AccessStream& stream, std::span<const ChunkSet> chunk_sets, const UpdateJob& job);

}  // namespace terrace
