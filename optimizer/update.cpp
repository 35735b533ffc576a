#include "optimizer/update.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>

#include "base/clock.h"
#include "optimizer/gradient_norm.h"

namespace terrace {
namespace {

/// What one thread does at a time, in elements: enough that asking for more is cheap, little enough that a small set of
/// chunks occupies all threads.
constexpr std::size_t elements_in_a_part = 32768;

/// One operand of a pinned chunk on the host, walked by elements.
struct Operand {
  const Pin* pin;
  std::size_t position;
  std::uint64_t element_bytes;

  std::span<std::byte> at(std::uint64_t element) const { return pin->host_bytes(position, element * element_bytes); }
  /// How many elements from that one on lie in one piece.
  std::uint64_t in_one_piece(std::uint64_t element) const { return at(element).size() / element_bytes; }
};

/// The chunks of a set in the order in which an update accesses them.
struct Operands {
  Operands(const Pin& pin, const ChunkSet& set)
      : parameter{&pin, 0, bytes_of(set.type)},
        gradient{&pin, 1, bytes_of(set.type)},
        momentum{&pin, 2, bytes_of(moment_type(set.states))},
        variance{&pin, 3, bytes_of(moment_type(set.states))} {
    if (set.master) {
      master = {&pin, 4, master_bytes(set.states, set.type)};
    }
  }

  std::uint64_t in_one_piece(std::uint64_t element) const {
    std::uint64_t count = std::numeric_limits<std::uint64_t>::max();
    for (const Operand& operand : {parameter, gradient, momentum, variance}) {
      count = std::min(count, operand.in_one_piece(element));
    }
    return master ? std::min(count, master->in_one_piece(element)) : count;
  }

  Operand parameter, gradient, momentum, variance;
  std::optional<Operand> master;
};

struct Part {
  const Segment* segment;
  AdamWStep step;
  AdamWRun run;
};

/// Cuts a segment where memory is, and into what one thread does at a time.
void add_parts(std::vector<Part>& parts, const Segment& segment, const Operands& operands, const AdamWStep& step) {
  std::uint64_t element = segment.element_offset;
  const std::uint64_t end = element + segment.elements;
  while (element < end) {
    const std::uint64_t count = std::min<std::uint64_t>(
        {operands.in_one_piece(element), end - element, static_cast<std::uint64_t>(elements_in_a_part)});
    parts.push_back({.segment = &segment,
                     .step = step,
                     .run = {.parameter_type = segment.chunks.type,
                             .gradient_type = segment.chunks.type,
                             .states = segment.chunks.states,
                             .parameter = operands.parameter.at(element).data(),
                             .gradient = operands.gradient.at(element).data(),
                             .master = operands.master ? operands.master->at(element).data() : nullptr,
                             .momentum = operands.momentum.at(element).data(),
                             .variance = operands.variance.at(element).data(),
                             .count = static_cast<std::size_t>(count)}});
    element += count;
  }
}

/// An optimizer begins without states, whatever one before it has left in the run.
void clear_states(const AdamWRun& run) {
  const std::size_t moment_bytes = run.count * bytes_of(moment_type(run.states));
  std::memset(run.momentum, 0, moment_bytes);
  std::memset(run.variance, 0, moment_bytes);
  if (run.master != nullptr) {
    std::memset(run.master, 0, run.count * master_bytes(run.states, run.parameter_type));
  }
}

double sum_of_block(const Segment& segment, const Operand& gradient, std::size_t index) {
  const std::uint64_t first = std::uint64_t{index} * BlockOfSquares::kElements;
  const std::uint64_t end = segment.element_offset + std::min(segment.elements, first + BlockOfSquares::kElements);
  BlockOfSquares block;
  for (std::uint64_t element = segment.element_offset + first; element < end;) {
    const std::uint64_t count = std::min(gradient.in_one_piece(element), end - element);
    block.add(segment.chunks.type, gradient.at(element).data(), static_cast<std::size_t>(count));
    element += count;
  }
  return block.sum();
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

}  // namespace

QueuedUpdate::QueuedUpdate(AccessStream& stream, const UpdateThreads& threads, UpdateJob job)
    : stream_(stream),
      threads_(threads),
      segment_count_(job.segments.size()),
      max_gradient_norm_(job.max_gradient_norm) {
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
    const Operand gradient{&pin, 0, bytes_of(item.chunks.type)};
    for (const auto& [position, segment] : item.segments) {
      sums[position] = sum_of_squares(segment.elements, threads_, [&, &each = segment](std::size_t block) {
        return sum_of_block(each, gradient, block);
      });
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
  const Operands operands(pin, item.chunks);
  std::vector<Part> parts;
  for (const auto& [position, segment] : item.segments) {
    add_parts(parts, segment, operands, AdamWStep(segment.options, segment.step, scale_));
  }
  threads_.for_each(parts.size(), [&](std::size_t i) {
    if (parts[i].segment->step == 1) {
      clear_states(parts[i].run);
    }
    adamw_update(parts[i].step, parts[i].run);
  });
}

}  // namespace terrace
