#include "optimizer/update.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>

#include "optimizer/gradient_norm.h"

namespace terrace {
namespace {

/// Positions of a job's segments by the chunk set that they lie in.
using SegmentsByChunk = std::map<std::uint32_t, std::vector<std::size_t>>;

SegmentsByChunk by_chunk(const UpdateJob& job) {
  SegmentsByChunk grouped;
  for (std::size_t i = 0; i < job.segments.size(); ++i) {
    grouped[job.segments[i].chunk_set].push_back(i);
  }
  return grouped;
}

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

double gradient_norm(AccessStream& stream, std::span<const ChunkSet> chunk_sets, const UpdateJob& job,
                     const SegmentsByChunk& segments) {
  std::vector<double> sums(job.segments.size());
  for (const auto& [index, positions] : segments) {
    const ChunkSet& set = chunk_sets[index];
    const std::array accesses{Access{set.gradient.value(), Tier::host, AccessMode::read}};
    const Pin pin = stream.acquire(accesses);
    const std::array operands{Operand{&pin, 0, set.master ? sizeof(std::uint16_t) : sizeof(float)}};
    for (const std::size_t position : positions) {
      SquaredNorm squared;
      for_each_piece(job.segments[position], operands, [&](std::uint64_t element, std::size_t count) {
        if (set.master) {
          squared.add(operands[0].address<const std::uint16_t>(element), count);
        } else {
          squared.add(operands[0].address<const float>(element), count);
        }
      });
      sums[position] = squared.sum();
    }
  }
  return combined_norm(sums);
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

}  // namespace

std::optional<double> run_update(AccessStream& stream, std::span<const ChunkSet> chunk_sets, const UpdateJob& job) {
  const SegmentsByChunk segments = by_chunk(job);
  std::optional<double> norm;
  float scale = 1.0f;
  if (job.max_gradient_norm > 0) {
    norm = gradient_norm(stream, chunk_sets, job, segments);
    scale = clip_coefficient(*norm, job.max_gradient_norm);
  }
  // Backwards: the gradients that the norm saw last are the likeliest to be on the host still.
  for (auto entry = segments.rbegin(); entry != segments.rend(); ++entry) {
    const ChunkSet& set = chunk_sets[entry->first];
    std::vector<Access> accesses{{set.parameter, Tier::host, AccessMode::write},
                                 {set.gradient.value(), Tier::host, AccessMode::read},
                                 {set.momentum.value(), Tier::host, AccessMode::write},
                                 {set.variance.value(), Tier::host, AccessMode::write}};
    if (set.master) {
      accesses.push_back({*set.master, Tier::host, AccessMode::write});
    }
    const Pin pin = stream.acquire(accesses);
    for (const std::size_t position : entry->second) {
      const Segment& segment = job.segments[position];
      const AdamWStep step(segment.options, segment.step, scale);
      set.master ? update_bf16(pin, segment, step) : update_fp32(pin, segment, step);
    }
  }
  return norm;
}

}  // namespace terrace
