/// The gradient norm, summed so that where bytes lie and how they are cut never changes a bit of it.
///
/// The elements of a parameter fall into blocks of 4,096 by their index in that parameter. Within a block, element i
/// is squared and added, in double, to lane i mod 16; lanes are added in a fixed order, then blocks in order, then
/// parameters in order. The square of an fp32 value is exact in double, so fused and separate multiply-add agree, and
/// every instruction set gives the same bits. No square overflows; a NaN or infinite element shows in the sum.
///
/// An object belongs to one thread at a time; distinct objects are independent. Nothing here throws or allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace terrace {

/// The sum of squares of one parameter's gradient, fed from its first element to its last in pieces of any length.
class SquaredNorm {
 public:
  static constexpr std::size_t kBlockElements = 4096;
  static constexpr std::size_t kLanes = 16;

  void add(const float* gradient, std::size_t count) noexcept;
  /// bf16, each element as its 16 bits.
  void add(const std::uint16_t* gradient_bf16, std::size_t count) noexcept;

  /// The sum over what was added so far.
  double sum() const noexcept;

 private:
  template <class T>
  void add_pieces(const T* gradient, std::size_t count) noexcept;

  double lanes_[kLanes] = {};  // of the current block
  std::size_t position_ = 0;   // in the current block, in elements; below kBlockElements
  double full_blocks_ = 0;     // sum of the blocks before it
};

/// The 2-norm over several parameters, from their sums of squares in parameter order.
double combined_norm(std::span<const double> sums_of_squares) noexcept;

/// min(1, max_norm / (norm + 1e-6)), as LibTorch's `clip_grad_norm_`: what gradients are multiplied by so that their
/// norm is at most `max_norm`. 0 for an infinite norm, NaN for a NaN.
float clip_coefficient(double norm, double max_norm) noexcept;

}  // namespace terrace
