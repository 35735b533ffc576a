#include "optimizer/gradient_norm.h"

#include <algorithm>
#include <cmath>

#include "optimizer/bfloat16.h"

// Highway compiles this file once for each instruction set and picks the best one at run time.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/gradient_norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kLanes = SquaredNorm::kLanes;

// A vector holds some of the 16 lanes; which ones share a vector makes no difference to any of them.
using Doubles = hn::CappedTag<double, kLanes>;
using Floats = hn::Rebind<float, Doubles>;

HWY_INLINE hn::Vec<Doubles> load_as_double(const float* gradient) {
  return hn::PromoteTo(Doubles(), hn::LoadU(Floats(), gradient));
}

HWY_INLINE hn::Vec<Doubles> load_as_double(const std::uint16_t* gradient_bf16) {
  const hn::Rebind<std::uint32_t, Floats> d32;
  const hn::Rebind<std::uint16_t, Floats> d16;
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, gradient_bf16)));
  return hn::PromoteTo(Doubles(), hn::BitCast(Floats(), bits));
}

// Adds `groups` times 16 elements to the 16 lanes.
template <class T>
HWY_INLINE void add_groups(const T* HWY_RESTRICT gradient, std::size_t groups, double* HWY_RESTRICT sums) {
  const Doubles d;
  const std::size_t width = hn::Lanes(d);
  HWY_ALIGN double lanes[kLanes];
  std::copy(sums, sums + kLanes, lanes);
  for (std::size_t group = 0; group < groups; ++group, gradient += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; lane += width) {
      const auto g = load_as_double(gradient + lane);
      hn::StoreU(hn::MulAdd(g, g, hn::LoadU(d, lanes + lane)), d, lanes + lane);
    }
  }
  std::copy(lanes, lanes + kLanes, sums);
}

void add_float(const float* gradient, std::size_t groups, double* sums) { add_groups(gradient, groups, sums); }

void add_bfloat16(const std::uint16_t* gradient, std::size_t groups, double* sums) {
  add_groups(gradient, groups, sums);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace {

HWY_EXPORT(add_float);
HWY_EXPORT(add_bfloat16);

void add_groups(const float* gradient, std::size_t groups, double* sums) {
  HWY_DYNAMIC_DISPATCH(add_float)(gradient, groups, sums);
}

void add_groups(const std::uint16_t* gradient, std::size_t groups, double* sums) {
  HWY_DYNAMIC_DISPATCH(add_bfloat16)(gradient, groups, sums);
}

double as_double(float value) { return value; }
double as_double(std::uint16_t bfloat16) { return bfloat16_to_float(bfloat16); }

double block_sum(const double (&lanes)[SquaredNorm::kLanes]) {
  double sums[SquaredNorm::kLanes];
  std::copy(std::begin(lanes), std::end(lanes), sums);
  for (std::size_t half = SquaredNorm::kLanes / 2; half != 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace

template <class T>
void SquaredNorm::add_pieces(const T* gradient, std::size_t count) noexcept {
  while (count != 0) {
    const std::size_t piece = std::min(count, kBlockElements - position_);
    const auto add_one_by_one = [&](std::size_t from, std::size_t to) {
      for (std::size_t i = from; i < to; ++i) {
        const double g = as_double(gradient[i]);
        lanes_[(position_ + i) % kLanes] += g * g;
      }
    };
    // Up to the next whole group of lanes, the whole groups, the rest.
    const std::size_t head = std::min(piece, (kLanes - position_ % kLanes) % kLanes);
    const std::size_t groups = (piece - head) / kLanes;
    add_one_by_one(0, head);
    if (groups != 0) add_groups(gradient + head, groups, lanes_);
    add_one_by_one(head + groups * kLanes, piece);

    position_ += piece;
    gradient += piece;
    count -= piece;
    if (position_ == kBlockElements) {
      full_blocks_ += block_sum(lanes_);
      std::fill(std::begin(lanes_), std::end(lanes_), 0.0);
      position_ = 0;
    }
  }
}

void SquaredNorm::add(const float* gradient, std::size_t count) noexcept { add_pieces(gradient, count); }

void SquaredNorm::add(const std::uint16_t* gradient_bf16, std::size_t count) noexcept {
  add_pieces(gradient_bf16, count);
}

double SquaredNorm::sum() const noexcept { return full_blocks_ + block_sum(lanes_); }

double combined_norm(std::span<const double> sums_of_squares) noexcept {
  double sum = 0;
  for (const double squares : sums_of_squares) sum += squares;
  return std::sqrt(sum);
}

float clip_coefficient(double norm, double max_norm) noexcept {
  // std::min keeps a NaN that comes first.
  return static_cast<float>(std::min(max_norm / (norm + 1e-6), 1.0));
}

}  // namespace terrace
#endif
