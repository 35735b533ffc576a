#include "memory/layout.h"

#include <algorithm>
#include <map>
#include <utility>

namespace terrace {
namespace {

constexpr std::uint64_t sizes_tried = 24;
/// Chunks become smaller, and transfers more, for one part in so many of what they take.
constexpr std::uint64_t worthwhile = 200;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Layout Layout::plan(std::span<const LayoutRun> runs, std::uint64_t chunk_bytes) {
  Layout layout;
  std::map<std::uint32_t, std::uint32_t> open;  // group -> the chunk that its next run may join
  for (const LayoutRun& run : runs) {
    const std::uint64_t limit =
        round_up(std::max<std::uint64_t>(chunk_bytes / run.element_bytes, 1), chunk_elements_unit);
    const std::uint64_t alignment = std::max<std::uint64_t>(run_alignment_bytes / run.element_bytes, 1);
    if (run.elements > limit) {
      layout.places.push_back({static_cast<std::uint32_t>(layout.chunks.size()), 0});
      layout.chunks.push_back({run.elements, run.element_bytes, run.group});
      continue;
    }
    const auto found = open.find(run.group);
    if (found != open.end()) {
      LayoutChunk& chunk = layout.chunks[found->second];
      const std::uint64_t offset = round_up(chunk.elements, alignment);
      if (offset + run.elements <= limit) {
        layout.places.push_back({found->second, offset});
        chunk.elements = offset + run.elements;
        continue;
      }
    }
    const auto fresh = static_cast<std::uint32_t>(layout.chunks.size());
    open[run.group] = fresh;
    layout.places.push_back({fresh, 0});
    layout.chunks.push_back({run.elements, run.element_bytes, run.group});
  }
  for (LayoutChunk& chunk : layout.chunks) {
    chunk.elements = round_up(std::max<std::uint64_t>(chunk.elements, 1), chunk_elements_unit);
  }
  return layout;
}

Layout Layout::in_order_of(std::span<const std::uint32_t> order) && {
  std::vector<LayoutPlace> by_run(places.size());
  for (std::size_t i = 0; i < order.size(); ++i) by_run.at(order[i]) = places.at(i);
  places = std::move(by_run);
  return std::move(*this);
}

std::size_t Layout::changes_of_chunk(std::span<const std::uint32_t> order) const {
  std::size_t changes = 0;
  for (std::size_t i = 1; i < order.size(); ++i) {
    changes += places.at(order[i]).chunk != places.at(order[i - 1]).chunk ? 1 : 0;
  }
  return changes;
}

std::uint64_t Layout::least_wasteful_chunk(std::span<const LayoutRun> runs, std::uint64_t most_bytes,
                                           const std::function<std::uint64_t(const LayoutChunk&)>& room_of) {
  const std::uint64_t step = round_up(most_bytes * 3 / (4 * sizes_tried), size_unit_bytes);
  const auto room_with = [&](std::uint64_t bytes) {
    std::uint64_t room = 0;
    for (const LayoutChunk& chunk : plan(runs, bytes).chunks) room += room_of(chunk);
    return room;
  };
  std::uint64_t best = most_bytes;
  std::uint64_t least_room = room_with(most_bytes);
  least_room -= least_room / worthwhile;
  for (std::uint64_t bytes = most_bytes / step * step; bytes >= most_bytes / 4 && bytes > 0; bytes -= step) {
    const std::uint64_t room = room_with(bytes);
    if (room < least_room) {
      best = bytes;
      least_room = room;
    }
  }
  return best;
}

}  // namespace terrace
