/// Which parameters share a chunk, and where in it each one lies.
///
/// Runs of one group (a data type, with or without gradients) are laid out in the order given. Every run
/// starts at a multiple of 512 bytes; a chunk is a multiple of 4,096 elements, so that ranks can divide it;
/// a run larger than a chunk has a chunk of its own size. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace terrace {

/// What is laid out: one parameter's elements.
struct LayoutRun {
  std::uint64_t elements = 0;
  std::uint32_t element_bytes = 4;
  std::uint32_t group = 0;  ///< runs of different groups never share a chunk
};

struct LayoutPlace {
  std::uint32_t chunk = 0;  ///< position in `Layout::chunks`
  std::uint64_t element_offset = 0;
};

struct LayoutChunk {
  std::uint64_t elements = 0;
  std::uint32_t element_bytes = 4;
  std::uint32_t group = 0;

  std::uint64_t bytes() const noexcept { return elements * element_bytes; }
};

struct Layout {
  static constexpr std::uint64_t chunk_elements_unit = 4096;
  static constexpr std::uint64_t run_alignment_bytes = 512;

  std::vector<LayoutChunk> chunks;
  std::vector<LayoutPlace> places;  ///< one a run, in their order

  /// Bytes of chunks that no run uses.
  std::uint64_t waste_bytes(std::span<const LayoutRun> runs) const;

  /// `chunk_bytes` is the size of a chunk of the first kind that the runs are laid out for; it is rounded up
  /// to a whole number of 4,096 elements.
  static Layout plan(std::span<const LayoutRun> runs, std::uint64_t chunk_bytes);
};

}  // namespace terrace
