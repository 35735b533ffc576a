#include "optimizer/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <limits>
#include <map>

#include "base/clock.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/standard_arithmetic.h"

namespace terrace {
namespace {

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
std::vector<ChunkAccess> accesses_to(const ChunkSet& set) {
  std::vector<ChunkAccess> accesses{{set.parameter, Tier::host, Access::write},
                                    {set.gradient.value(), Tier::host, Access::read},
                                    {set.momentum.value(), Tier::host, Access::write}};
  for (const std::optional<ChunkId>& chunk : {set.master, set.variance}) {
    if (chunk) {
      accesses.push_back({*chunk, Tier::host, Access::write});
    }
  }
  return accesses;
}

/// What is pinned of them.
struct Operands {
  Operands(const Pin& pin, const ChunkSet& set)
      : parameter{&pin, 0, bytes_of(set.type)},
        gradient{&pin, 1, bytes_of(set.gradient_type)},
        momentum{&pin, 2, bytes_of(moment_type(set.states))} {
    std::size_t position = 3;
    if (set.master) {
      master = {&pin, position++, master_bytes(set.states, set.type)};
    }
    if (set.variance) {
      variance = {&pin, position++, bytes_of(moment_type(set.states))};
    }
  }

  std::uint64_t in_one_piece(std::uint64_t element) const {
    std::uint64_t count = std::numeric_limits<std::uint64_t>::max();
    for (const std::optional<Operand>& operand :
         {std::optional(parameter), std::optional(gradient), std::optional(momentum), master, variance}) {
      if (operand) {
        count = std::min(count, operand->in_one_piece(element));
      }
    }
    return count;
  }

  Operand parameter, gradient, momentum;
  std::optional<Operand> master, variance;
};

struct Part {
  const UpdateRule* rule;
  std::int64_t step;  ///< counts this update
  UpdateRun run;
};

/// Cuts a segment where memory is, and into what one thread does at a time.
void add_parts(std::vector<Part>& parts, const Segment& segment, const Operands& operands, std::int64_t step) {
  std::uint64_t element = segment.element_offset;
  const std::uint64_t end = element + segment.elements;
  while (element < end) {
    const std::uint64_t count = std::min<std::uint64_t>(
        {operands.in_one_piece(element), end - element, static_cast<std::uint64_t>(update_part_elements)});
    parts.push_back({.rule = segment.rule.get(),
                     .step = step,
                     .run = {.parameter_type = segment.chunks.type,
                             .gradient_type = segment.chunks.gradient_type,
                             .states = segment.chunks.states,
                             .parameter = operands.parameter.at(element).data(),
                             .gradient = operands.gradient.at(element).data(),
                             .master = operands.master ? operands.master->at(element).data() : nullptr,
                             .momentum = operands.momentum.at(element).data(),
                             .variance = operands.variance ? operands.variance->at(element).data() : nullptr,
                             .count = static_cast<std::size_t>(count)}});
    element += count;
  }
}

/// An optimizer begins without states, whatever one before it has left in the run.
void clear_states(const UpdateRun& run) {
  const std::size_t moment_bytes = run.count * bytes_of(moment_type(run.states));
  std::memset(run.momentum, 0, moment_bytes);
  if (run.variance != nullptr) {
    std::memset(run.variance, 0, moment_bytes);
  }
  if (run.master != nullptr) {
    std::memset(run.master, 0, run.count * master_bytes(run.states, run.parameter_type));
  }
}

/// Bytes of gradients from which on more of them make threads no busier.
constexpr std::uint64_t summed_together = std::uint64_t{256} << 20U;

GradientRun run_of(const Segment& segment) { return {segment.element_offset, segment.elements}; }

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

QueuedUpdate::QueuedUpdate(AccessStream& stream, const UpdateThreads& threads, const GradientSums& sums, UpdateJob job)
    : stream_(stream), threads_(threads), sums_(sums), job_(std::move(job)) {
  const StandardArithmetic standard;
  scale_ = static_cast<float>(1 / job_.loss_scale);
  std::map<ChunkId, std::size_t> item_of;
  for (std::size_t position = 0; position < job_.segments.size(); ++position) {
    const ChunkSet& set = job_.segments[position].chunks;
    const auto [known, is_new] = item_of.emplace(set.parameter, items_.size());
    if (is_new) {
      items_.push_back({.chunks = set, .accesses = accesses_to(set), .segments = {}});
    }
    items_[known->second].segments.push_back(position);
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
  if (!needs_norm()) {
    count_updates();
  }
}

void QueuedUpdate::count_updates() {
  for (const Segment& segment : job_.segments) {
    counts_.push_back(++*segment.updates);
  }
}

std::optional<double> QueuedUpdate::known_sum_of(const Segment& segment) const {
  return sums_.of(segment.chunks.gradient.value(), run_of(segment));
}

bool QueuedUpdate::reads_for_norm(std::size_t item) const {
  const std::vector<std::size_t>& segments = items_[item].segments;
  return needs_norm() && std::any_of(segments.begin(), segments.end(),
                                     [&](std::size_t position) { return !known_sum_of(job_.segments[position]); });
}

std::vector<double> QueuedUpdate::sums_of_squares_by_segment(AccessOrigin origin) {
  std::vector<double> sums(job_.segments.size());
  // Together, as far as they can be had without room being made for them or being waited for.
  std::vector<std::size_t> together;       // positions in parameter order
  std::vector<GradientsOnHost> gradients;  // of those,
  std::vector<std::uint64_t> elements;     // and how many they are
  std::deque<Pin> pins;                    // which stay where they are
  std::uint64_t bytes = 0;
  const auto sum_up = [&] {
    const OwnArithmetic arithmetic(stream_, origin);
    const std::vector<double> of_these = sums_of_squares(elements, threads_, [&](std::size_t i, std::size_t block) {
      return gradients[i].sum_of_block(run_of(job_.segments[together[i]]), block);
    });
    for (std::size_t i = 0; i < of_these.size(); ++i) {
      sums[together[i]] = of_these[i];
    }
    together.clear();
    gradients.clear();
    elements.clear();
    pins.clear();
    bytes = 0;
  };
  const auto is_at_home_on_host = [&](ChunkId chunk) {
    return stream_.inspect([&](const Policy& policy) {
      return policy.chunk(chunk).info().home == Tier::host && policy.chunk(chunk).at(Tier::host).readable();
    });
  };
  for (const Item& item : items_) {
    std::vector<std::size_t> unknown;  // positions
    for (const std::size_t position : item.segments) {
      if (const std::optional<double> sum = known_sum_of(job_.segments[position])) {
        sums[position] = *sum;
      } else {
        unknown.push_back(position);
      }
    }
    if (unknown.empty()) {
      continue;
    }
    const ChunkId chunk = item.chunks.gradient.value();
    if (!pins.empty() && (bytes >= summed_together || !is_at_home_on_host(chunk))) {
      sum_up();
    }
    const std::array accesses{ChunkAccess{chunk, Tier::host, Access::read}};
    pins.push_back(stream_.acquire(accesses, origin));
    for (const std::size_t position : unknown) {
      together.push_back(position);
      gradients.push_back({item.chunks.gradient_type, pins.back().host(0), stream_.granule_bytes()});
      elements.push_back(job_.segments[position].elements);
      bytes += elements.back() * bytes_of(item.chunks.gradient_type);
    }
  }
  sum_up();
  return sums;
}

void QueuedUpdate::find_norm(AccessOrigin origin) {
  const StandardArithmetic standard;
  const std::vector<double> sums = sums_of_squares_by_segment(origin);
  norm_ = combined_norm(sums) / job_.loss_scale;
  if (job_.max_gradient_norm > 0) {
    scale_ = static_cast<float>(clip_coefficient(*norm_, job_.max_gradient_norm) / job_.loss_scale);
  }
  is_skipped_ = job_.non_finite != NonFinite::pass && !std::isfinite(*norm_);
  if (!is_skipped_) {
    count_updates();
  } else if (job_.non_finite == NonFinite::error) {
    const auto first = std::find_if(sums.begin(), sums.end(), [](double sum) { return !std::isfinite(sum); });
    refusal_ = std::make_exception_ptr(non_finite_gradient(
        job_.step, "'" + job_.segments[static_cast<std::size_t>(first - sums.begin())].parameter + "'"));
  }
  if (job_.report) {
    job_.report->note({.step = job_.step, .all = *norm_, .by_group = norms_by_group(sums), .skipped = is_skipped_});
  }
}

std::vector<double> QueuedUpdate::norms_by_group(std::span<const double> sums) const {
  std::vector<std::vector<double>> of_group(job_.groups);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    of_group.at(job_.segments[i].group).push_back(sums[i]);
  }
  std::vector<double> norms;
  for (const std::vector<double>& each : of_group) {
    norms.push_back(combined_norm(each) / job_.loss_scale);
  }
  return norms;
}

void QueuedUpdate::update(std::size_t at, AccessOrigin origin) {
  Item& item = items_[at];
  Pin pin;
  if (!is_skipped_) {
    pin = stream_.acquire(item.accesses, origin);
    const OwnArithmetic arithmetic(stream_, origin);
    update(item, pin);
  }
  // While it is pinned: a gradient that dies with this is not evicted first.
  for (const std::size_t position : item.segments) {
    job_.segments[position].gradient.reset();
  }
}

void QueuedUpdate::update(const Item& item, const Pin& pin) const {
  const Operands operands(pin, item.chunks);
  std::vector<Part> parts;
  for (const std::size_t position : item.segments) {
    add_parts(parts, job_.segments[position], operands, counts_[position]);
  }
  // A thread takes many at first and few at last, which are to be those that take long.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& one, const Part& other) { return one.run.count < other.run.count; });
  threads_.for_each(parts.size(), [&](std::size_t i) {
    const Part& part = parts[i];
    if (part.step == 1) {
      clear_states(part.run);
    }
    part.rule->update(part.step, scale_, part.run);
  });
}

}  // namespace terrace
