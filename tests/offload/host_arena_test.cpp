#include "offload/host_arena.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/huge_pages.h"

namespace terrace {
namespace {

constexpr std::size_t kGranule = 8192;

std::size_t resident_pages(std::byte* address, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / 4096);
  EXPECT_EQ(::mincore(address, bytes, pages.data()), 0);
  return static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }));
}

TEST(HostArena, hands_out_distinct_aligned_granules_that_can_be_filled) {
  HostArena arena(kGranule, 16);
  const std::vector<std::byte*> granules = arena.allocate(16);
  for (std::size_t i = 0; i < granules.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(granules[i]) % 4096, 0U);
    std::memset(granules[i], static_cast<int>(i), kGranule);
  }
  for (std::size_t i = 0; i < granules.size(); ++i) {
    EXPECT_EQ(granules[i][0], static_cast<std::byte>(i));
    EXPECT_EQ(granules[i][kGranule - 1], static_cast<std::byte>(i));
  }
  EXPECT_EQ(arena.used_bytes(), arena.capacity_bytes());
}

TEST(HostArena, reuses_touched_memory_before_untouched) {
  HostArena arena(kGranule, 16);
  const std::vector<std::byte*> first = arena.allocate(3);
  arena.free(first);
  const std::vector<std::byte*> again = arena.allocate(3);
  EXPECT_EQ((std::set<std::byte*>(first.begin(), first.end())), (std::set<std::byte*>(again.begin(), again.end())));
  EXPECT_EQ(arena.touched_bytes(), 3 * kGranule);
  arena.allocate(1);
  EXPECT_EQ(arena.touched_bytes(), 4 * kGranule);
}

TEST(HostArena, hands_out_granules_side_by_side_where_there_are_so_many_and_otherwise_the_lowest) {
  HostArena arena(kGranule, 16);
  const std::vector<std::byte*> all = arena.allocate(16);
  const auto granules = [&](std::vector<std::size_t> numbers) {
    std::vector<std::byte*> chosen;
    for (const std::size_t number : numbers) chosen.push_back(all[number]);
    return chosen;
  };
  arena.free(granules({12, 1, 3, 9, 8, 7, 15}));
  EXPECT_EQ(arena.allocate(3), granules({7, 8, 9}));
  EXPECT_EQ(arena.allocate(3), granules({1, 3, 12}));
  arena.free(granules({1, 3, 12}));
  EXPECT_EQ(arena.trim(), 4 * kGranule);
  arena.free(granules({5}));
  EXPECT_EQ(arena.allocate(3), granules({5, 1, 3})) << "what has memory first";
}

TEST(HostArena, goes_no_further_up_while_there_are_granules_below) {
  HostArena arena(kGranule, 16);
  const std::vector<std::byte*> granules = arena.allocate(8);
  for (const std::size_t number : {1, 4}) arena.free(std::span(granules).subspan(number, 1));
  EXPECT_EQ(arena.trim(), 2 * kGranule);
  arena.allocate(2);
  EXPECT_EQ(arena.used_region().size(), 8 * kGranule);
}

TEST(HostArena, takes_no_memory_before_it_is_touched) {
  HostArena arena(kGranule, 1024);
  std::byte* granule = arena.allocate(1).front();
  EXPECT_EQ(resident_pages(granule, kGranule), 0U);
  granule[0] = std::byte{1};
  EXPECT_EQ(resident_pages(granule, kGranule), 1U);
}

TEST(HostArena, keeps_its_memory_for_as_long_as_it_is_told) {
  HostArena arena(kGranule, 1024);
  const std::vector<std::byte*> granules = arena.allocate(5);
  for (std::byte* granule : granules) *granule = std::byte{1};
  EXPECT_EQ(arena.used_region().size(), 5 * kGranule);
  arena.free(granules);
  arena.keep_all();
  EXPECT_EQ(arena.trim(), 0U);
  for (const std::byte* granule : granules) EXPECT_EQ(*granule, std::byte{1});
  arena.may_trim();
  EXPECT_EQ(arena.trim(), 5 * kGranule);
  EXPECT_EQ(arena.used_region().size(), 5 * kGranule) << "what was used once counts";
}

TEST(HostArena, begins_with_a_huge_page_and_is_fixed_in_parts_that_begin_with_them) {
  constexpr std::size_t granule = 256 << 10;
  constexpr std::size_t page = huge_page_bytes;
  HostArena arena(granule, 2 * HostArena::most_parts * page / granule);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.region().data()) % page, 0U);
  const auto sizes = [&] {
    std::vector<std::size_t> all;
    std::byte* next = arena.region().data();
    for (const std::span<std::byte> part : arena.used_parts()) {
      EXPECT_EQ(part.data(), next);
      next += part.size();
      all.push_back(part.size());
    }
    EXPECT_EQ(next, arena.region().data() + arena.used_region().size());
    return all;
  };
  EXPECT_EQ(sizes(), std::vector<std::size_t>{});
  arena.allocate(3);
  EXPECT_EQ(sizes(), (std::vector<std::size_t>{3 * granule}));
  arena.allocate(page / granule);
  EXPECT_EQ(sizes(), (std::vector<std::size_t>{page, 3 * granule}));
  arena.allocate(HostArena::most_parts * page / granule - page / granule - 3);
  EXPECT_EQ(sizes(), std::vector<std::size_t>(HostArena::most_parts, page));
  arena.allocate(3);
  std::vector<std::size_t> pairs(HostArena::most_parts / 2, 2 * page);
  pairs.push_back(3 * granule);
  EXPECT_EQ(sizes(), pairs) << "no more parts than are to be";
}

TEST(HostArena, memory_that_free_granules_had_only_because_it_was_fixed_is_given_back) {
  HostArena arena(kGranule, 1024);
  const std::vector<std::byte*> granules = arena.allocate(8);
  for (std::byte* granule : granules) *granule = std::byte{1};
  arena.free(std::span(granules).subspan(1));
  EXPECT_EQ(arena.trim(), 7 * kGranule);
  arena.keep_all();
  for (std::byte* granule : granules) *granule = std::byte{1};  // as by whoever fixes all that was ever used
  EXPECT_EQ(arena.touched_bytes(), 8 * kGranule);
  arena.may_trim();
  EXPECT_EQ(arena.trim(), 7 * kGranule);
  EXPECT_EQ(resident_pages(granules[1], 7 * kGranule), 0U);
  EXPECT_EQ(arena.allocate(1).front(), granules[1]) << "the low end first, as before";
}

TEST(HostArena, trim_gives_back_free_granules_and_leaves_used_ones) {
  HostArena arena(kGranule, 16);
  const std::vector<std::byte*> granules = arena.allocate(8);
  for (std::byte* granule : granules) std::memset(granule, 5, kGranule);
  std::vector<std::byte*> freed, kept;
  for (std::size_t i = 0; i < granules.size(); ++i) (i % 3 == 0 ? kept : freed).push_back(granules[i]);
  arena.free(freed);

  EXPECT_EQ(arena.trim(), freed.size() * kGranule);
  EXPECT_EQ(arena.trim(), 0U);
  EXPECT_EQ(arena.touched_bytes(), kept.size() * kGranule);
  EXPECT_EQ(arena.used_bytes(), kept.size() * kGranule);
  for (std::byte* granule : freed) EXPECT_EQ(resident_pages(granule, kGranule), 0U);
  for (std::byte* granule : kept) {
    EXPECT_TRUE(std::all_of(granule, granule + kGranule, [](std::byte b) { return b == std::byte{5}; }));
  }
  // All of it can be used again.
  const std::vector<std::byte*> again = arena.allocate(16 - kept.size());
  EXPECT_EQ(std::set<std::byte*>(again.begin(), again.end()).size(), again.size());
  EXPECT_EQ(arena.touched_bytes(), arena.capacity_bytes());
}

TEST(HostArena, refuses_more_than_is_free_and_takes_nothing_then) {
  HostArena arena(kGranule, 4);
  arena.allocate(3);
  EXPECT_THROW(arena.allocate(2), LogicError);
  EXPECT_EQ(arena.used_bytes(), 3 * kGranule);
  EXPECT_NO_THROW(arena.allocate(1));
  EXPECT_THROW(arena.allocate(1), LogicError);
  EXPECT_TRUE(arena.allocate(0).empty());
}

TEST(HostArena, refuses_to_free_what_it_did_not_hand_out_and_frees_nothing_then) {
  HostArena arena(kGranule, 4), other(kGranule, 4);
  const std::vector<std::byte*> granules = arena.allocate(2);
  std::byte local{};
  for (std::byte* wrong : {granules[0] + 4096, granules[0] + 4 * kGranule, other.allocate(1).front(), &local,
                           static_cast<std::byte*>(nullptr), granules[0]}) {
    const std::vector<std::byte*> freed = {granules[1], granules[0], wrong};
    EXPECT_THROW(arena.free(freed), LogicError);
    EXPECT_EQ(arena.used_bytes(), 2 * kGranule);
  }
  arena.free(granules);
  EXPECT_THROW(arena.free(granules), LogicError);
  EXPECT_EQ(arena.used_bytes(), 0U);
}

TEST(HostArena, says_how_to_go_on_when_the_region_cannot_be_mapped) {
  try {
    HostArena arena(std::size_t{1} << 50, 16);
    FAIL() << "16 PiB were mapped";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("lower host.memory"), std::string::npos) << error.what();
  }
  EXPECT_THROW(HostArena(4096, ~std::size_t{0}), LogicError);
  EXPECT_THROW(HostArena(5000, 1), LogicError);
  EXPECT_THROW(HostArena(0, 1), LogicError);
}

TEST(HostArena, may_be_empty) {
  HostArena arena(kGranule, 0);
  EXPECT_THROW(arena.allocate(1), LogicError);
  EXPECT_EQ(arena.trim(), 0U);
}

TEST(HostArena, never_gives_a_granule_to_two_threads) {
  constexpr std::size_t kThreads = 4;
  HostArena arena(4096, kThreads * 4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 500; ++round) {
        const std::vector<std::byte*> granules = arena.allocate(1 + static_cast<std::size_t>(round) % 4);
        for (std::byte* granule : granules) std::memset(granule, static_cast<int>(t + 1), 4096);
        for (std::byte* granule : granules) {
          EXPECT_EQ(std::count(granule, granule + 4096, static_cast<std::byte>(t + 1)), 4096);
        }
        arena.free(granules);
        if (round % 50 == 0) arena.trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena.used_bytes(), 0U);
}

TEST(HostArena, chooses_the_largest_granule_that_divides_the_smallest_chunk) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  EXPECT_EQ(HostArena::choose_granule(4096), 4096U);
  EXPECT_EQ(HostArena::choose_granule(12 * 4096), 4096U);
  EXPECT_EQ(HostArena::choose_granule(64 * kMiB), kMiB);
  EXPECT_EQ(HostArena::choose_granule(3 * kMiB / 2), 3 * kMiB / 64);
  EXPECT_EQ(HostArena::choose_granule(257 * 4096), 4096U);
  EXPECT_THROW(HostArena::choose_granule(0), LogicError);
  EXPECT_THROW(HostArena::choose_granule(6000), LogicError);
}

}  // namespace
}  // namespace terrace
