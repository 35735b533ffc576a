/// The gradient norm, summed so that where bytes lie and how they are cut never changes a bit of it.
///
/// The elements of a parameter fall into blocks of 4,096 by their index in that parameter. Within a block, element i
/// is squared and added, in double, to lane i mod 16; lanes are added in a fixed order, then blocks in order, then
/// parameters in order. The square of an fp32 value is exact in double, so fused and separate multiply-add agree, and
/// every instruction set gives the same bits. No square overflows; a NaN or infinite element shows in the sum.
///
/// An object belongs to one thread at a time; distinct objects are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "optimizer/element_type.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// The sum of squares of a block, fed from its first element to its last in pieces of any length.
class BlockOfSquares {
 public:
  static constexpr std::size_t kElements = 4096;
  static constexpr std::size_t kLanes = 16;

  /// Of at most as many elements as the block still has room for.
  void add(ElementType type, const void* gradient, std::size_t count) noexcept;

  double sum() const noexcept;

 private:
  double lanes_[kLanes] = {};
  std::size_t position_ = 0;  // in elements
};

/// How many blocks the elements of a parameter fall into.
constexpr std::size_t blocks_of_squares(std::uint64_t elements) noexcept {
  return static_cast<std::size_t>((elements + BlockOfSquares::kElements - 1) / BlockOfSquares::kElements);
}

/// The sum of squares of one parameter's gradient, from those of its blocks.
double sum_of_blocks(std::span<const double> blocks) noexcept;

/// The same of several parameters, of so many elements each, where `sum_of_block` gives that of a block, by the
/// parameter's position and its own. It is called by several threads, which share all blocks at once: they are slow to
/// gather for a few.
std::vector<double> sums_of_squares(std::span<const std::uint64_t> elements, const UpdateThreads& threads,
                                    const std::function<double(std::size_t, std::size_t)>& sum_of_block);

/// The sum of squares of a gradient that lies in one piece.
double sum_of_squares(ElementType type, const void* gradient, std::size_t count, const UpdateThreads& threads);

/// The 2-norm over several parameters, from their sums of squares in parameter order.
double combined_norm(std::span<const double> sums_of_squares) noexcept;

/// min(1, max_norm / (norm + 1e-6)), as LibTorch's `clip_grad_norm_`: what gradients are multiplied by so that their
/// norm is at most `max_norm`. 0 for an infinite norm, NaN for a NaN; but always 1 where `max_norm` is infinite.
float clip_coefficient(double norm, double max_norm) noexcept;

}  // namespace terrace
