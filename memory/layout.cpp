#include "memory/layout.h"

#include <algorithm>
#include <map>

namespace terrace {
namespace {

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

std::uint64_t Layout::waste_bytes(std::span<const LayoutRun> runs) const {
  std::uint64_t chunk_bytes = 0;
  std::uint64_t run_bytes = 0;
  for (const LayoutChunk& chunk : chunks) {
    chunk_bytes += chunk.bytes();
  }
  for (const LayoutRun& run : runs) {
    run_bytes += run.elements * run.element_bytes;
  }
  return chunk_bytes - run_bytes;
}

}  // namespace terrace
