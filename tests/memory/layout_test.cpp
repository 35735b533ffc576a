#include "memory/layout.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t chunk_bytes = 64 * KiB;  // 16,384 elements of four bytes

std::vector<LayoutRun> random_runs(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<LayoutRun> runs(200);
  for (LayoutRun& run : runs) {
    run.group = static_cast<std::uint32_t>(random() % 3);
    run.element_bytes = run.group == 0 ? 2 : 4;
    run.elements = random() % 10 == 0 ? random() % 100'000 : random() % 4000;
  }
  return runs;
}

TEST(Layout, every_run_starts_at_a_multiple_of_512_bytes) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<LayoutRun> runs = random_runs(seed);
    const Layout layout = Layout::plan(runs, chunk_bytes);
    ASSERT_EQ(layout.places.size(), runs.size());
    for (std::size_t i = 0; i < runs.size(); ++i) {
      EXPECT_EQ(layout.places[i].element_offset * runs[i].element_bytes % 512, 0u) << "run " << i;
    }
  }
}

TEST(Layout, runs_lie_within_their_chunk_and_never_overlap) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<LayoutRun> runs = random_runs(seed);
    const Layout layout = Layout::plan(runs, chunk_bytes);
    std::vector<std::uint64_t> end(layout.chunks.size(), 0);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const LayoutPlace& place = layout.places[i];
      ASSERT_LT(place.chunk, layout.chunks.size());
      EXPECT_GE(place.element_offset, end[place.chunk]) << "run " << i << " overlaps the one before it";
      end[place.chunk] = place.element_offset + runs[i].elements;
      EXPECT_LE(end[place.chunk], layout.chunks[place.chunk].elements) << "run " << i;
    }
  }
}

TEST(Layout, groups_never_share_a_chunk) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<LayoutRun> runs = random_runs(seed);
    const Layout layout = Layout::plan(runs, chunk_bytes);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const LayoutChunk& chunk = layout.chunks[layout.places[i].chunk];
      EXPECT_EQ(chunk.group, runs[i].group);
      EXPECT_EQ(chunk.element_bytes, runs[i].element_bytes);
    }
  }
}

TEST(Layout, interleaved_groups_each_fill_their_own_chunk) {
  const std::vector<LayoutRun> runs{{100, 4, 0}, {100, 4, 1}, {100, 4, 0}, {100, 4, 1}};
  const Layout layout = Layout::plan(runs, chunk_bytes);
  EXPECT_EQ(layout.chunks.size(), 2u);
  EXPECT_EQ(layout.places[2].chunk, layout.places[0].chunk);
  EXPECT_EQ(layout.places[2].element_offset, 128u);
  EXPECT_EQ(layout.places[3].chunk, layout.places[1].chunk);
}

TEST(Layout, chunks_are_multiples_of_4096_elements) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, 5000 * KiB / 1024, chunk_bytes, chunk_bytes + 1}) {
    const Layout layout = Layout::plan(random_runs(bytes), bytes);
    for (const LayoutChunk& chunk : layout.chunks) {
      EXPECT_GT(chunk.elements, 0u);
      EXPECT_EQ(chunk.elements % 4096, 0u) << "chunks of " << bytes;
      EXPECT_EQ(chunk.bytes(), chunk.elements * chunk.element_bytes);
    }
  }
}

TEST(Layout, a_run_larger_than_a_chunk_has_one_of_its_own_and_closes_none) {
  const std::vector<LayoutRun> runs{{1000, 4, 0}, {20'000, 4, 0}, {1000, 4, 0}};
  const Layout layout = Layout::plan(runs, chunk_bytes);
  ASSERT_EQ(layout.chunks.size(), 2u);
  EXPECT_EQ(layout.places[1].element_offset, 0u);
  EXPECT_EQ(layout.chunks[layout.places[1].chunk].elements, 20'480u) << "20,000 rounded up to 4,096";
  EXPECT_EQ(layout.places[0].chunk, layout.places[2].chunk);
  EXPECT_NE(layout.places[1].chunk, layout.places[0].chunk);
}

TEST(Layout, a_run_of_exactly_one_chunk_fills_it) {
  const std::vector<LayoutRun> runs{{16'384, 4, 0}, {1, 4, 0}};
  const Layout layout = Layout::plan(runs, chunk_bytes);
  ASSERT_EQ(layout.chunks.size(), 2u);
  EXPECT_EQ(layout.chunks[0].elements, 16'384u);
  EXPECT_EQ(layout.chunks[1].elements, 4096u) << "the last chunk is only as long as it needs to be";
}

TEST(Layout, ordinary_chunks_stay_within_the_size_asked_for) {
  const std::vector<LayoutRun> runs = random_runs(7);
  const Layout layout = Layout::plan(runs, chunk_bytes);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].elements * runs[i].element_bytes <= chunk_bytes) {
      EXPECT_LE(layout.chunks[layout.places[i].chunk].bytes(), chunk_bytes);
    }
  }
}

TEST(Layout, empty_and_scalar_runs_have_a_place) {
  const std::vector<LayoutRun> runs{{0, 4, 0}, {1, 4, 0}, {0, 2, 1}};
  const Layout layout = Layout::plan(runs, chunk_bytes);
  ASSERT_EQ(layout.places.size(), 3u);
  EXPECT_EQ(layout.chunks.size(), 2u);
  for (const LayoutChunk& chunk : layout.chunks) EXPECT_EQ(chunk.elements, 4096u);
}

TEST(Layout, no_runs_need_no_chunks) { EXPECT_TRUE(Layout::plan({}, chunk_bytes).chunks.empty()); }

TEST(Layout, waste_is_what_no_run_uses) {
  const std::vector<LayoutRun> runs{{4000, 4, 0}, {20'480, 4, 0}, {4096, 2, 1}};
  const Layout layout = Layout::plan(runs, chunk_bytes);
  EXPECT_EQ(layout.waste_bytes(runs), 96u * 4);
}

}  // namespace
}  // namespace terrace
