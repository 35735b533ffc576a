#include "optimizer/update.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>

#include "base/clock.h"
#include "optimizer/gradient_norm.h"

namespace terrace {
namespace {

/// One operand of a pinned chunk on the host, walked by elements.
struct Operand {
  const Pin* pin;
  std::size_t position;
  std::uint64_t element_bytes;

  std::span<std::byte> at(std::uint64_t element) const { return pin->host_bytes(position, element * element_bytes); }

  template <class T>
  T* address(std::uint64_t element) const {
    return reinterpret_cast<T*>(at(element).data());
  }
};

/// Calls `on_piece(first element, count)` for pieces of a segment that lie in one granule of every operand.
template <std::size_t n, class OnPiece>
void for_each_piece(const Segment& segment, const std::array<Operand, n>& operands, OnPiece&& on_piece) {
  std::uint64_t element = segment.element_offset;
  std::uint64_t left = segment.elements;
  while (left > 0) {
    std::uint64_t count = left;
    for (const Operand& operand : operands) {
      count = std::min<std::uint64_t>(count, operand.at(element).size() / operand.element_bytes);
    }
    on_piece(element, static_cast<std::size_t>(count));
    element += count;
    left -= count;
  }
}

void update_fp32(const Pin& pin, const Segment& segment, const AdamWStep& step) {
  const std::array operands{Operand{&pin, 0, sizeof(float)}, Operand{&pin, 1, sizeof(float)},
                            Operand{&pin, 2, sizeof(float)}, Operand{&pin, 3, sizeof(float)}};
  for_each_piece(segment, operands, [&](std::uint64_t element, std::size_t count) {
    adamw_update(step, operands[0].address<float>(element), operands[1].address<const float>(element),
                 operands[2].address<float>(element), operands[3].address<float>(element), count);
  });
}

void update_bf16(const Pin& pin, const Segment& segment, const AdamWStep& step) {
  const std::array operands{Operand{&pin, 0, sizeof(std::uint16_t)}, Operand{&pin, 1, sizeof(std::uint16_t)},
                            Operand{&pin, 2, sizeof(float)}, Operand{&pin, 3, sizeof(float)},
                            Operand{&pin, 4, sizeof(float)}};
  for_each_piece(segment, operands, [&](std::uint64_t element, std::size_t count) {
    adamw_update(step, operands[0].address<std::uint16_t>(element), operands[1].address<const std::uint16_t>(element),
                 operands[4].address<float>(element), operands[2].address<float>(element),
                 operands[3].address<float>(element), count);
  });
}

/// Counts the time until its end, where it is a thread of the program's that updates.
class OwnArithmetic {
 public:
  OwnArithmetic(AccessStream& stream, AccessOrigin origin) : stream_(stream), origin_(origin) {}
  OwnArithmetic(const OwnArithmetic&) = delete;
  OwnArithmetic& operator=(const OwnArithmetic&) = delete;
  ~OwnArithmetic() {
    if (origin_ != AccessOrigin::background_work) {
      stream_.note_update_arithmetic(stopwatch_.elapsed_ns());
    }
  }

 private:
  AccessStream& stream_;
  const AccessOrigin origin_;
  const Stopwatch stopwatch_;
};

/// An optimizer begins without states, whatever one before it has left in the run.
void clear_states(const Pin& pin, const Segment& segment) {
  const auto clear = [&](std::size_t position) {
    const std::array operands{Operand{&pin, position, sizeof(float)}};
    for_each_piece(segment, operands, [&](std::uint64_t element, std::size_t count) {
      std::fill_n(operands[0].address<float>(element), count, 0.0f);
    });
  };
  clear(2);
  clear(3);
  if (segment.chunks.master) {
    clear(4);
  }
}

}  // namespace

QueuedUpdate::QueuedUpdate(AccessStream& stream, UpdateJob job)
    : stream_(stream), segment_count_(job.segments.size()), max_gradient_norm_(job.max_gradient_norm) {
  std::map<ChunkId, std::size_t> item_of;
  for (std::size_t position = 0; position < job.segments.size(); ++position) {
    Segment& segment = job.segments[position];
    const auto [known, is_new] = item_of.emplace(segment.chunks.parameter, items_.size());
    if (is_new) {
      const ChunkSet& set = segment.chunks;
      items_.push_back({.chunks = set,
                        .accesses = {{set.parameter, Tier::host, Access::write},
                                     {set.gradient.value(), Tier::host, Access::read},
                                     {set.momentum.value(), Tier::host, Access::write},
                                     {set.variance.value(), Tier::host, Access::write}},
                        .segments = {}});
      if (set.master) {
        items_.back().accesses.push_back({*set.master, Tier::host, Access::write});
      }
    }
    items_[known->second].segments.emplace_back(position, std::move(segment));
  }
  const auto distance = [&](const Item& item) {
    return stream.inspect(
        [&](const Policy& policy) { return policy.forecast(Tier::device).distance(item.chunks.parameter); });
  };
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  for (std::size_t item = 0; item < items_.size(); ++item) {
    order.emplace_back(distance(items_[item]), item);
  }
  std::sort(order.begin(), order.end());
  std::vector<Item> sorted;
  for (const auto& [away, item] : order) {
    sorted.push_back(std::move(items_[item]));
  }
  items_ = std::move(sorted);
}

void QueuedUpdate::find_norm(AccessOrigin origin) {
  std::vector<double> sums(segment_count_);
  for (const Item& item : items_) {
    const std::array accesses{ChunkAccess{item.chunks.gradient.value(), Tier::host, Access::read}};
    const Pin pin = stream_.acquire(accesses, origin);
    const OwnArithmetic arithmetic(stream_, origin);
    const std::array operands{Operand{&pin, 0, item.chunks.master ? sizeof(std::uint16_t) : sizeof(float)}};
    for (const auto& [position, segment] : item.segments) {
      SquaredNorm squared;
      for_each_piece(segment, operands, [&](std::uint64_t element, std::size_t count) {
        if (item.chunks.master) {
          squared.add(operands[0].address<const std::uint16_t>(element), count);
        } else {
          squared.add(operands[0].address<const float>(element), count);
        }
      });
      sums[position] = squared.sum();
    }
  }
  norm_ = combined_norm(sums);
  scale_ = clip_coefficient(*norm_, max_gradient_norm_);
}

void QueuedUpdate::update(std::size_t at, AccessOrigin origin) {
  Item& item = items_[at];
  const Pin pin = stream_.acquire(item.accesses, origin);
  {
    const OwnArithmetic arithmetic(stream_, origin);
    update(item, pin);
  }
  // While it is pinned: a gradient that dies with this is not evicted first.
  item.segments.clear();
}

void QueuedUpdate::update(const Item& item, const Pin& pin) const {
  for (const auto& [position, segment] : item.segments) {
    if (segment.step == 1) {
      clear_states(pin, segment);
    }
    const AdamWStep step(segment.options, segment.step, scale_);
    item.chunks.master ? update_bf16(pin, segment, step) : update_fp32(pin, segment, step);
  }
}

}  // namespace terrace
