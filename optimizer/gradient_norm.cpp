#include "optimizer/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "optimizer/bfloat16.h"
#include "optimizer/float16.h"

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

constexpr std::size_t kLanes = BlockOfSquares::kLanes;

// A vector holds some of the 16 lanes; which ones share a vector makes no difference to any of them.
using Doubles = hn::CappedTag<double, kLanes>;
using Floats = hn::Rebind<float, Doubles>;

using Words = hn::Rebind<std::uint32_t, Floats>;
using Halves = hn::Rebind<std::uint16_t, Floats>;

#include "optimizer/widening.inc"

struct Float32 {
  using Lane = float;
  static HWY_INLINE hn::Vec<Floats> load(const Lane* from) { return hn::LoadU(Floats(), from); }
};

struct Bfloat16 {
  using Lane = std::uint16_t;
  static HWY_INLINE hn::Vec<Floats> load(const Lane* from) {
    return widened_bfloat16(Words(), hn::PromoteTo(Words(), hn::LoadU(Halves(), from)));
  }
};

struct Float16 {
  using Lane = std::uint16_t;
  static HWY_INLINE hn::Vec<Floats> load(const Lane* from) {
    return widened_float16(Words(), hn::PromoteTo(Words(), hn::LoadU(Halves(), from)));
  }
};

template <class Type>
void add_groups_of(const void* elements, std::size_t groups, double* HWY_RESTRICT sums) {
  const auto* HWY_RESTRICT gradient = static_cast<const typename Type::Lane*>(elements);
  const Doubles d;
  const std::size_t width = hn::Lanes(d);
  HWY_ALIGN double lanes[kLanes];
  std::copy(sums, sums + kLanes, lanes);
  for (std::size_t group = 0; group < groups; ++group, gradient += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; lane += width) {
      const auto g = hn::PromoteTo(d, Type::load(gradient + lane));
      hn::StoreU(hn::MulAdd(g, g, hn::LoadU(d, lanes + lane)), d, lanes + lane);
    }
  }
  std::copy(lanes, lanes + kLanes, sums);
}

// Adds `groups` times 16 elements to the 16 lanes.
void add_groups(ElementType type, const void* gradient, std::size_t groups, double* sums) {
  switch (type) {
    case ElementType::float32:
      return add_groups_of<Float32>(gradient, groups, sums);
    case ElementType::bfloat16:
      return add_groups_of<Bfloat16>(gradient, groups, sums);
    case ElementType::float16:
      return add_groups_of<Float16>(gradient, groups, sums);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace {

HWY_EXPORT(add_groups);

double element(ElementType type, const void* gradient, std::size_t at) {
  switch (type) {
    case ElementType::float32:
      return static_cast<const float*>(gradient)[at];
    case ElementType::bfloat16:
      return bfloat16_to_float(static_cast<const std::uint16_t*>(gradient)[at]);
    case ElementType::float16:
      return float16_to_float(static_cast<const std::uint16_t*>(gradient)[at]);
  }
  return 0;
}

}  // namespace

void BlockOfSquares::add(ElementType type, const void* gradient, std::size_t count) noexcept {
  const auto add_one_by_one = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      const double g = element(type, gradient, i);
      lanes_[(position_ + i) % kLanes] += g * g;
    }
  };
  // Up to the next whole group of lanes, the whole groups, the rest.
  const std::size_t head = std::min(count, (kLanes - position_ % kLanes) % kLanes);
  const std::size_t groups = (count - head) / kLanes;
  add_one_by_one(0, head);
  if (groups != 0) {
    const void* const first = static_cast<const std::byte*>(gradient) + head * bytes_of(type);
    HWY_DYNAMIC_DISPATCH(add_groups)(type, first, groups, lanes_);
  }
  add_one_by_one(head + groups * kLanes, count);
  position_ += count;
}

double BlockOfSquares::sum() const noexcept {
  double sums[kLanes];
  std::copy(std::begin(lanes_), std::end(lanes_), sums);
  for (std::size_t half = kLanes / 2; half != 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

double sum_of_blocks(std::span<const double> blocks) noexcept {
  double sum = 0;
  for (const double block : blocks) sum += block;
  return sum;
}

std::vector<double> sums_of_squares(std::span<const std::uint64_t> elements, const UpdateThreads& threads,
                                    const std::function<double(std::size_t, std::size_t)>& sum_of_block) {
  std::vector<std::size_t> ends;  // of each parameter's blocks, which follow those of the one before
  std::size_t count = 0;
  for (const std::uint64_t each : elements) {
    ends.push_back(count += blocks_of_squares(each));
  }
  std::vector<double> blocks(count);
  const auto first_of = [&](std::size_t parameter) { return parameter == 0 ? 0 : ends[parameter - 1]; };
  constexpr std::size_t in_a_part = 8;
  threads.for_each((count + in_a_part - 1) / in_a_part, [&](std::size_t part) {
    const std::size_t first = part * in_a_part;
    auto parameter = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (std::size_t i = first; i < std::min(count, first + in_a_part); ++i) {
      while (i >= ends[parameter]) ++parameter;
      blocks[i] = sum_of_block(parameter, i - first_of(parameter));
    }
  });
  std::vector<double> sums;
  for (std::size_t parameter = 0; parameter < ends.size(); ++parameter) {
    sums.push_back(
        sum_of_blocks(std::span(blocks).subspan(first_of(parameter), ends[parameter] - first_of(parameter))));
  }
  return sums;
}

double sum_of_squares(ElementType type, const void* gradient, std::size_t count, const UpdateThreads& threads) {
  const std::uint64_t elements = count;
  const auto sum_of_block = [&](std::size_t /*parameter*/, std::size_t i) {
    const std::size_t first = i * BlockOfSquares::kElements;
    BlockOfSquares block;
    block.add(type, static_cast<const std::byte*>(gradient) + first * bytes_of(type),
              std::min(BlockOfSquares::kElements, count - first));
    return block.sum();
  };
  return sums_of_squares({&elements, 1}, threads, sum_of_block).front();
}

double combined_norm(std::span<const double> sums_of_squares) noexcept {
  double sum = 0;
  for (const double squares : sums_of_squares) sum += squares;
  return std::sqrt(sum);
}

float clip_coefficient(double norm, double max_norm) noexcept {
  if (std::isinf(max_norm)) {
    return 1;
  }
  if (std::isnan(norm)) {
    return std::numeric_limits<float>::quiet_NaN();  // without what an element's NaN says in its lower bits
  }
  return static_cast<float>(std::min(max_norm / (norm + 1e-6), 1.0));
}

}  // namespace terrace
#endif
