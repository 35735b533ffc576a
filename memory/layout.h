/// Which parameters share a chunk, and where in it each one lies.
///
/// Runs of one group (a data type, with or without gradients) are laid out in the order given. Every run
/// starts at a multiple of 512 bytes; a chunk is a multiple of 4,096 elements, so that ranks can divide it;
/// a run larger than a chunk has a chunk of its own size, and the small ones around it share one, as near to each other
/// as if it were not there. Pure.
///
/// Biases and what normalises lie with the large runs of their layer and come with these. ZeRO-3 keeps such small ones
/// on the device (`stage3_param_persistence_threshold`); here, in chunks of their own that each layer uses, they spared
/// no transfer, and of their gradients, all in a chunk that is dirty throughout backward, some had to leave in between:
/// a GPT of 76 million parameters, an eighth of them on the device, moved 2% more to it and 3% more from it.
#pragma once

#include <cstdint>
#include <functional>
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

  /// `chunk_bytes` is the size of a chunk of the first kind that the runs are laid out for; it is rounded up
  /// to a whole number of 4,096 elements.
  static Layout plan(std::span<const LayoutRun> runs, std::uint64_t chunk_bytes);

  /// This layout of runs that were taken in another order than their own: `order` names each once, in the order taken.
  Layout in_order_of(std::span<const std::uint32_t> order) &&;

  /// How often a program that uses the runs in `order` goes on to another chunk.
  std::size_t changes_of_chunk(std::span<const std::uint32_t> order) const;

  /// The chunk size, of some from a quarter of `most_bytes` up to it, with which the chunks of these runs take the
  /// least room in all, as `room_of` tells for each; `most_bytes` where that is hardly more. Between whole blocks of a
  /// tier and the ends of runs a few percent are lost with one size and next to nothing with another: PatrickStar (Fang
  /// et al., 2021) and Colossal-AI's Gemini search for it too.
  static std::uint64_t least_wasteful_chunk(std::span<const LayoutRun> runs, std::uint64_t most_bytes,
                                            const std::function<std::uint64_t(const LayoutChunk&)>& room_of);
  /// Sizes that are tried are multiples of this, so that each may be given as `chunk_bytes`.
  static constexpr std::uint64_t size_unit_bytes = chunk_elements_unit * 4;
};

}  // namespace terrace
