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

TEST(Layout, runs_taken_in_another_order_know_their_places_and_which_chunks_a_program_goes_through) {
  // Two fill a chunk: a program that uses every other one changes it each time, unless they were taken in its order.
  const std::vector<LayoutRun> runs(4, {.elements = 8192});
  const std::vector<std::uint32_t> order{0, 2, 1, 3};
  const Layout as_given = Layout::plan(runs, chunk_bytes);
  EXPECT_EQ(as_given.changes_of_chunk(order), 3u);
  const Layout by_use = Layout::plan(runs, chunk_bytes).in_order_of(order);
  EXPECT_EQ(by_use.changes_of_chunk(order), 1u);
  EXPECT_EQ(by_use.places[0].chunk, by_use.places[2].chunk);
  EXPECT_EQ(by_use.places[2].element_offset, 8192u);
  EXPECT_EQ(by_use.places[1].element_offset, 0u);
  EXPECT_EQ(Layout::plan({}, chunk_bytes).changes_of_chunk({}), 0u);
}

TEST(Layout, no_runs_need_no_chunks) { EXPECT_TRUE(Layout::plan({}, chunk_bytes).chunks.empty()); }

/// On tiers that give out whole blocks.
std::uint64_t in_blocks(const LayoutChunk& chunk) {
  constexpr std::uint64_t block = 8 * KiB;
  return (chunk.bytes() + block - 1) / block * block;
}

std::uint64_t room(std::span<const LayoutRun> runs, std::uint64_t bytes) {
  std::uint64_t sum = 0;
  for (const LayoutChunk& chunk : Layout::plan(runs, bytes).chunks) sum += in_blocks(chunk);
  return sum;
}

/// Of equals the largest, and the largest of all unless it takes a part in 200 more.
TEST(Layout, the_size_found_wastes_the_least_of_those_tried) {
  int smaller = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const std::vector<LayoutRun> runs(60, {.elements = 1000 + 331 * seed});
    const std::uint64_t most = (seed % 2 == 0 ? 128 : 65 * 16) * KiB;
    const std::uint64_t best = Layout::least_wasteful_chunk(runs, most, in_blocks);
    smaller += best < most ? 1 : 0;
    EXPECT_GE(best, most / 4);
    EXPECT_LE(best, most);
    EXPECT_EQ(best % Layout::size_unit_bytes, 0u);
    const std::uint64_t step = seed % 2 == 0 ? 16 * KiB : 48 * KiB;
    for (std::uint64_t bytes = most / step * step; bytes >= most / 4; bytes -= step) {
      EXPECT_GE(200 * room(runs, bytes), 199 * room(runs, best)) << bytes << ", seed " << seed;
      if (best < most) {
        EXPECT_GE(room(runs, bytes), room(runs, best) + (bytes > best ? 1 : 0)) << bytes << ", seed " << seed;
      }
    }
    if (best < most) {
      EXPECT_LT(200 * room(runs, best), 199 * room(runs, most) + 200);
    }
  }
  EXPECT_GT(smaller, 5);
}

TEST(Layout, chunks_are_as_large_as_they_may_be_where_that_costs_nothing) {
  EXPECT_EQ(Layout::least_wasteful_chunk({}, chunk_bytes, in_blocks), chunk_bytes);
  const std::vector<LayoutRun> even(64, {.elements = 4096});
  EXPECT_EQ(Layout::least_wasteful_chunk(even, chunk_bytes, in_blocks), chunk_bytes);
}

TEST(Layout, a_smaller_chunk_is_found_where_the_largest_holds_no_whole_number_of_runs) {
  // Five of these take 60 KiB of 64, four are 48.
  const std::vector<LayoutRun> runs(12, {.elements = 3 * 1024});
  const std::uint64_t best = Layout::least_wasteful_chunk(runs, chunk_bytes, in_blocks);
  EXPECT_EQ(best, 48 * KiB);
  EXPECT_EQ(room(runs, best), 12 * 12 * KiB);
  EXPECT_GT(room(runs, chunk_bytes), 12 * 12 * KiB);
}

}  // namespace
}  // namespace terrace
