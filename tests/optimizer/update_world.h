/// Sets of chunks in a small world of tiers, and beside them plain arrays of what they should hold, for the tests of
/// queued updates.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "optimizer/gradient_norm.h"
#include "optimizer/update.h"
#include "tests/memory/stream_world.h"
#include "tests/optimizer/random_state.h"

namespace terrace {

inline constexpr std::size_t granule = 4096;
inline constexpr StreamSizes roomy{
    .granule_bytes = granule, .device_bytes = 1 << 20, .host_bytes = 256 * granule, .nvme_extents = 256};
/// The host holds no more than a set or two.
inline constexpr StreamSizes scarce{
    .granule_bytes = granule, .device_bytes = 1 << 20, .host_bytes = 16 * granule, .nvme_extents = 256};

/// A set of chunks, and beside it plain arrays of what they should hold. It has two parameters.
using AnyState = std::variant<FloatState, Bfloat16State, SplitState, SplitBfloat16State>;
using AnyGradient = std::variant<std::vector<float>, std::vector<std::uint16_t>>;

inline constexpr std::size_t format_count = std::variant_size_v<AnyState>;

template <std::size_t format = 0>
AnyState state_of(std::size_t wanted, std::size_t elements, std::uint32_t seed) {
  if constexpr (format + 1 < format_count) {
    if (wanted != format) return state_of<format + 1>(wanted, elements, seed);
  }
  return AnyState(std::in_place_index<format>, elements, seed);
}

struct TestSet {
  TestSet(std::uint32_t the_index, std::size_t format)
      : index(the_index), elements(format == 0 ? 1500 : 3000), values(state_of(format, elements, the_index)) {}

  using Bytes = std::span<std::byte>;
  template <class T>
  static Bytes bytes_of(std::vector<T>& array) {
    return std::as_writable_bytes(std::span(array));
  }
  Bytes parameter() {
    return std::visit([](auto& each) { return bytes_of(each.parameter); }, values);
  }
  Bytes gradient_bytes() {
    return std::visit([](auto& each) { return bytes_of(each); }, gradient);
  }
  /// What an update changes.
  std::vector<std::pair<ChunkId, Bytes>> state() {
    return std::visit(
        [&](auto& each) {
          std::vector<std::pair<ChunkId, Bytes>> all{{chunks.parameter, bytes_of(each.parameter)},
                                                     {chunks.momentum.value(), bytes_of(each.momentum)},
                                                     {chunks.variance.value(), bytes_of(each.variance)}};
          if (each.has_master) all.emplace_back(chunks.master.value(), bytes_of(each.master));
          return all;
        },
        values);
  }
  void fill_gradient(std::uint32_t seed) {
    std::visit([&](const auto& each) { gradient = each.gradient(elements, seed); }, values);
  }
  /// What an update of a run of elements works on.
  UpdateRun run(std::size_t from, std::size_t to) {
    return std::visit(
        [&](auto& each) {
          using State = std::decay_t<decltype(each)>;
          return part_of(each.run(std::get<typename State::Gradient>(gradient)), from, to - from);
        },
        values);
  }
  /// Where the two parameters begin and end.
  std::array<std::pair<std::size_t, std::size_t>, 2> runs() const { return {{{0, 1000}, {1000, elements}}}; }
  AdamWOptions options() const {
    return {.learning_rate = 1e-2 * (index + 1),
            .beta1 = 0.9,
            .beta2 = 0.999,
            .epsilon = 1e-8,
            .weight_decay = 0.1 * index};
  }

  const std::uint32_t index;
  const std::size_t elements;
  ChunkSet chunks;
  AnyState values;
  AnyGradient gradient;
};

class UpdateWorld {
 public:
  explicit UpdateWorld(const StreamSizes& sizes, Tier the_home = Tier::host) : world(sizes), home(the_home) {}

  TestSet& add_set(std::size_t format) {
    TestSet& set = sets.emplace_back(static_cast<std::uint32_t>(sets.size()), format);
    const auto add = [&](Kind kind, std::size_t element_bytes) {
      return world.stream.add_chunk(kind, set.index, set.elements * element_bytes, home);
    };
    set.fill_gradient(++gradients_);
    const UpdateRun run = set.run(0, set.elements);
    const std::size_t moment_bytes = bytes_of(moment_type(run.states));
    set.chunks.type = run.parameter_type;
    set.chunks.gradient_type = run.gradient_type;
    set.chunks.states = run.states;
    set.chunks.parameter = add(Kind::parameter, bytes_of(run.parameter_type));
    set.chunks.gradient = add(Kind::gradient, bytes_of(run.gradient_type));
    if (run.master != nullptr) set.chunks.master = add(Kind::master, master_bytes(run.states, run.parameter_type));
    set.chunks.momentum = add(Kind::momentum, moment_bytes);
    set.chunks.variance = add(Kind::variance, moment_bytes);
    for (const auto& [chunk, bytes] : set.state()) write(chunk, bytes);
    write_gradient(set);
    return set;
  }
  /// In all formats, by turns.
  void add_sets(int count) {
    for (int i = 0; i < count; ++i) add_set(static_cast<std::size_t>(i) % format_count);
  }

  void write(ChunkId chunk, std::span<std::byte> bytes) {
    const Pin pin = world.acquire(chunk, Tier::host, Access::write);
    for_each_part(pin, 0, Tier::host, bytes.size(), [&](std::byte* at, std::uint64_t offset, std::uint64_t length) {
      std::memcpy(at, bytes.data() + offset, length);
    });
  }
  bool holds(ChunkId chunk, std::span<const std::byte> bytes, AccessOrigin origin = AccessOrigin::program) {
    const ChunkAccess access{chunk, Tier::host, Access::read};
    const Pin pin = world.stream.acquire({&access, 1}, origin);
    bool same = true;
    for_each_part(pin, 0, Tier::host, bytes.size(), [&](std::byte* at, std::uint64_t offset, std::uint64_t length) {
      same = same && std::memcmp(at, bytes.data() + offset, length) == 0;
    });
    return same;
  }
  /// Whether the set is as its arrays are. By accesses of prior work: without asking for its update.
  bool is_current(TestSet& set, AccessOrigin origin = AccessOrigin::prior_work) {
    for (const auto& [chunk, bytes] : set.state()) {
      if (!holds(chunk, bytes, origin)) return false;
    }
    return true;
  }
  std::vector<std::uint32_t> current() {
    std::vector<std::uint32_t> indices;
    for (TestSet& set : sets) {
      if (is_current(set)) indices.push_back(set.index);
    }
    return indices;
  }
  std::vector<std::uint32_t> all() const {
    std::vector<std::uint32_t> indices(sets.size());
    std::iota(indices.begin(), indices.end(), 0u);
    return indices;
  }

  void write_gradient(TestSet& set) {
    set.fill_gradient(1000 + ++gradients_);
    write(*set.chunks.gradient, set.gradient_bytes());
  }

  UpdateJob job(std::int64_t step, double max_norm, const std::vector<std::uint32_t>& of) {
    UpdateJob job;
    job.max_gradient_norm = max_norm;
    for (const std::uint32_t index : of) {
      for (const auto& [from, to] : sets[index].runs()) {
        job.segments.push_back({.chunks = sets[index].chunks,
                                .element_offset = from,
                                .elements = to - from,
                                .rule = std::make_shared<AdamWRule>(sets[index].options()),
                                .updates = std::make_shared<std::int64_t>(step - 1),
                                .parameter = "set " + std::to_string(index) + " from " + std::to_string(from),
                                .gradient = nullptr});
      }
    }
    return job;
  }
  /// Does to the arrays what the job does to the chunks; gives the gradients' norm.
  double update_arrays(std::int64_t step, double max_norm, const std::vector<std::uint32_t>& of) {
    std::vector<double> sums;
    for (const std::uint32_t index : of) {
      TestSet& set = sets[index];
      for (const auto& [from, to] : set.runs()) {
        const UpdateRun run = set.run(from, to);
        sums.push_back(sum_of_squares(run.gradient_type, run.gradient, run.count, UpdateThreads(1)));
      }
    }
    const double norm = combined_norm(sums);
    const float scale = max_norm > 0 ? clip_coefficient(norm, max_norm) : 1.0f;
    for (const std::uint32_t index : of) {
      TestSet& set = sets[index];
      const AdamWStep adamw(set.options(), step, scale);
      for (const auto& [from, to] : set.runs()) {
        adamw_update(adamw, set.run(from, to));
      }
    }
    return norm;
  }

  StreamWorld world;
  std::deque<TestSet> sets;
  Tier home;  ///< of the sets that are added next

 private:
  std::uint32_t gradients_ = 0;
};

inline constexpr double clipping = 1.0;
inline constexpr double not_clipping = 0.0;

}  // namespace terrace
