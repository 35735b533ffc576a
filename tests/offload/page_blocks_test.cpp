#include "offload/page_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/base/noted.h"
#include "tests/offload/pages_in_process.h"
#include "tests/offload/refused_call.h"
#include "tests/offload/resource_limit.h"

namespace terrace {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t MiB = 1024 * 1024;
constexpr std::uint64_t plenty = 1024 * MiB;

bool holds(const std::byte* block, std::uint64_t bytes, int value) {
  return std::all_of(block, block + bytes, [&](std::byte byte) { return std::to_integer<int>(byte) == value; });
}

TEST(PageBlocks, sizes_are_rounded_up_to_whole_pages) {
  EXPECT_EQ(PageBlocks::rounded(1), page);
  EXPECT_EQ(PageBlocks::rounded(page), page);
  EXPECT_EQ(PageBlocks::rounded(page + 1), 2 * page);
}

TEST(PageBlocks, all_bytes_of_a_block_can_be_used) {
  PageBlocks blocks(plenty);
  for (const std::uint64_t bytes :
       {std::uint64_t{1}, page - 1, page, 3 * page + 7, 2 * MiB - page, 2 * MiB, 5 * MiB + 1}) {
    const std::uint64_t rounded = PageBlocks::rounded(bytes);
    std::byte* block = blocks.take(bytes, plenty);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % page, 0u);
    std::memset(block, 0x5a, rounded);
    EXPECT_TRUE(holds(block, rounded, 0x5a)) << bytes;
    blocks.give_back(block, bytes);
  }
}

TEST(PageBlocks, blocks_in_use_do_not_overlap) {
  PageBlocks blocks(plenty);
  std::vector<std::byte*> taken;
  for (int i = 0; i < 20; ++i) {
    taken.push_back(blocks.take(3 * page, plenty));
    std::memset(taken.back(), i, 3 * page);
  }
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(holds(taken[static_cast<std::size_t>(i)], 3 * page, i)) << i;
  for (std::byte* block : taken) blocks.give_back(block, 3 * page);
}

TEST(PageBlocks, a_block_given_back_serves_the_next_of_its_size) {
  PageBlocks blocks(plenty);
  std::byte* block = blocks.take(5 * page, plenty);
  blocks.give_back(block, 5 * page);
  EXPECT_EQ(blocks.mapped(), 5 * page) << "it is kept";
  EXPECT_EQ(blocks.take(5 * page - 100, plenty), block) << "the same pages";
  EXPECT_EQ(blocks.mapped(), 5 * page);
  blocks.give_back(block, 5 * page - 100);
}

TEST(PageBlocks, blocks_of_other_sizes_are_cut_from_what_is_kept_and_joined_again) {
  PageBlocks blocks(plenty);
  std::byte* large = blocks.take(8 * page, plenty);
  blocks.give_back(large, 8 * page);
  std::byte* first = blocks.take(5 * page, plenty);
  std::byte* second = blocks.take(3 * page, plenty);
  EXPECT_EQ(blocks.mapped(), 8 * page);
  blocks.give_back(first, 5 * page);
  blocks.give_back(second, 3 * page);
  EXPECT_EQ(blocks.take(8 * page, plenty), large);
  EXPECT_EQ(blocks.mapped(), 8 * page);
  blocks.give_back(large, 8 * page);
}

/// Blocks of `bytes` that take the whole capacity, every other of which has been given back.
struct Scattered {
  Scattered(std::size_t count, std::uint64_t each) : bytes(each), limit(count * each), blocks(limit) {
    for (std::size_t i = 0; i < count; ++i) {
      ones.push_back(blocks.take(bytes, limit));
      std::memset(ones.back(), static_cast<int>(i), bytes);
    }
    before = pages_in_process();
    for (std::size_t i = 0; i < count; i += 2) blocks.give_back(ones[i], bytes);
  }
  void give_back_the_others() {
    for (std::size_t i = 1; i < ones.size(); i += 2) {
      EXPECT_TRUE(holds(ones[i], bytes, static_cast<int>(i))) << i;
      blocks.give_back(ones[i], bytes);
    }
  }
  const std::uint64_t bytes;
  const std::uint64_t limit;
  PageBlocks blocks;
  std::vector<std::byte*> ones;
  std::uint64_t before = 0;  ///< pages of the process with all of them
};

TEST(PageBlocks, scattered_pages_serve_a_block_larger_than_any_of_their_stretches) {
  Scattered world(8, page);
  std::byte* block = world.blocks.take(4 * page, world.limit);
  EXPECT_EQ(world.blocks.mapped(), 8 * page);
  std::memset(block, 0x77, 4 * page);
  EXPECT_TRUE(holds(block, 4 * page, 0x77));
  world.give_back_the_others();
  world.blocks.give_back(block, 4 * page);
  std::byte* whole = world.blocks.take(8 * page, world.limit);
  std::memset(whole, 1, 8 * page);
  world.blocks.give_back(whole, 8 * page);
}

TEST(PageBlocks, scattered_pages_that_are_mapped_together_are_resident_once) {
  Scattered world(64, MiB);
  std::byte* block = world.blocks.take(32 * MiB, world.limit);
  std::memset(block, 1, 32 * MiB);
  EXPECT_LE(pages_in_process(), world.before + 2 * MiB) << "the kernel counts in batches";
  world.blocks.give_back(block, 32 * MiB);
  world.give_back_the_others();
}

TEST(PageBlocks, pages_that_were_mapped_together_elsewhere_are_back_with_the_block_they_lie_in) {
  Scattered world(64, MiB);
  std::byte* block = world.blocks.take(32 * MiB, world.limit);
  world.blocks.give_back(block, 32 * MiB);
  world.give_back_the_others();
  block = world.blocks.take(64 * MiB, world.limit);
  EXPECT_GE(pages_in_process() + 2 * MiB, world.before) << "none is left to fault";
  world.blocks.give_back(block, 64 * MiB);
}

TEST(PageBlocks, pages_that_were_mapped_together_and_given_back_to_the_system_stay_with_it_until_they_are_touched) {
  Scattered world(64, MiB);
  std::byte* block = world.blocks.take(32 * MiB, world.limit);
  world.blocks.give_back(block, 32 * MiB);
  world.give_back_the_others();
  world.blocks.trim(0);
  const std::uint64_t before = pages_in_process();
  for (int i = 0; i < 2; ++i) world.blocks.give_back(world.blocks.take(64 * MiB, plenty), 64 * MiB);
  EXPECT_LE(pages_in_process(), before + 2 * MiB);
}

std::size_t mappings_of_process() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

TEST(PageBlocks, pages_that_have_been_together_and_are_back_are_one_mapping_again) {
  constexpr std::uint64_t limit = 512 * page;
  PageBlocks blocks(limit);
  std::mt19937_64 random(11);
  const std::size_t before = mappings_of_process();
  for (int round = 0; round < 50; ++round) {
    std::vector<std::pair<std::byte*, std::uint64_t>> taken;
    for (std::uint64_t left = limit; left > 0; left -= std::min(left, taken.back().second)) {
      const std::uint64_t bytes = std::min(left, (1 + random() % 40) * page);
      taken.emplace_back(blocks.take(bytes, limit), bytes);
      std::memset(taken.back().first, round, bytes);
    }
    std::shuffle(taken.begin(), taken.end(), random);
    const auto half = static_cast<std::ptrdiff_t>(taken.size() / 2);
    std::uint64_t free = 0;
    std::for_each(taken.begin(), taken.begin() + half, [&](const auto& each) {
      blocks.give_back(each.first, each.second);
      free += each.second;
    });
    std::byte* const scattered = blocks.take(free, limit);
    std::memset(scattered, -1, free);
    std::for_each(taken.begin() + half, taken.end(), [&](const auto& each) {
      EXPECT_TRUE(holds(each.first, each.second, round));
      blocks.give_back(each.first, each.second);
    });
    EXPECT_TRUE(holds(scattered, free, 255));
    blocks.give_back(scattered, free);
  }
  EXPECT_LE(mappings_of_process(), before + 20);
}

TEST(PageBlocks, where_the_system_moves_no_pages_blocks_of_scattered_ones_are_as_good) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_mremap, ENOSYS, [] {
    Scattered world(64, MiB);
    for (int again = 0; again < 3; ++again) {
      std::byte* const block = world.blocks.take(32 * MiB, world.limit);
      std::memset(block, 9, 32 * MiB);
      const bool is_within = pages_in_process() <= world.before + 2 * MiB && world.blocks.mapped() == world.limit;
      if (!holds(block, 32 * MiB, 9) || !is_within) return false;
      world.blocks.give_back(block, 32 * MiB);
    }
    world.give_back_the_others();
    std::byte* const whole = world.blocks.take(64 * MiB, world.limit);
    std::memset(whole, 3, 64 * MiB);
    const bool is_whole = holds(whole, 64 * MiB, 3);
    world.blocks.give_back(whole, 64 * MiB);
    return is_whole && !noted("device: pages are cleared").empty();
  }));
}

TEST(PageBlocks, a_block_of_scattered_pages_that_the_system_refuses_is_out_of_memory_and_nothing_is_lost) {
  Scattered world(64, MiB);
  for (const std::uint64_t more : {MiB, 5 * MiB}) {  // no piece, and some of them
    const ResourceLimit limit(RLIMIT_DATA, bytes_in_status("VmData") + more);
    EXPECT_THROW(world.blocks.take(32 * MiB, world.limit), OutOfMemory);
  }
  std::byte* const block = world.blocks.take(32 * MiB, world.limit);
  std::memset(block, 9, 32 * MiB);
  EXPECT_TRUE(holds(block, 32 * MiB, 9));
  world.give_back_the_others();
  world.blocks.give_back(block, 32 * MiB);
  std::byte* const all = world.blocks.take(64 * MiB, world.limit);
  std::memset(all, 3, 64 * MiB);
  EXPECT_TRUE(holds(all, 64 * MiB, 3));
  world.blocks.give_back(all, 64 * MiB);
}

/// What khugepaged does in its own time, at once.
void make_huge(const Scattered& world) {
#ifdef MADV_COLLAPSE
  constexpr int collapse = MADV_COLLAPSE;
#else
  constexpr int collapse = 25;
#endif
  for (std::uint64_t at = 0; at < world.limit; at += 2 * MiB) ::madvise(world.ones[0] + at, 2 * MiB, collapse);
}

TEST(PageBlocks, the_system_puts_no_pages_where_some_have_moved_away) {
  Scattered world(64, MiB);
  std::byte* const block = world.blocks.take(32 * MiB, world.limit);
  make_huge(world);
  EXPECT_LE(pages_in_process(), world.before + 2 * MiB);
  world.blocks.give_back(block, 32 * MiB);
  world.give_back_the_others();
}

TEST(PageBlocks, the_system_puts_no_pages_where_some_were_given_back_to_it) {
  Scattered world(64, MiB);
  world.blocks.trim(32 * MiB);
  make_huge(world);
  EXPECT_LE(pages_in_process(), world.before - 30 * MiB);
  world.give_back_the_others();
  world.blocks.trim(0);
  std::byte* const all = world.blocks.take(64 * MiB, world.limit);
  std::memset(all, 1, 64 * MiB);
  EXPECT_GE(pages_in_process() + 2 * MiB, world.before) << "they can be had again";
  world.blocks.give_back(all, 64 * MiB);
}

TEST(PageBlocks, memory_that_nobody_has_touched_does_not_become_resident_by_being_taken_again) {
  PageBlocks blocks(64 * MiB);
  blocks.give_back(blocks.take(64 * MiB, plenty), 64 * MiB);
  const std::uint64_t before = pages_in_process();
  std::byte* block = blocks.take(64 * MiB, plenty);
  EXPECT_LE(pages_in_process(), before + 2 * MiB);
  blocks.give_back(block, 64 * MiB);
}

TEST(PageBlocks, a_block_beyond_the_capacity_is_refused_and_costs_nothing) {
  PageBlocks blocks(4 * page);
  std::byte* used = blocks.take(3 * page, plenty);
  EXPECT_THROW(blocks.take(2 * page, plenty), OutOfMemory);
  std::byte* last = blocks.take(page, plenty);
  blocks.give_back(last, page);
  blocks.give_back(used, 3 * page);
}

TEST(PageBlocks, a_capacity_that_the_system_refuses_is_out_of_memory) {
  EXPECT_THROW(PageBlocks(std::uint64_t{1} << 62U), OutOfMemory);
}

TEST(PageBlocks, trimming_gives_back_what_is_kept_and_never_what_is_in_use) {
  PageBlocks blocks(plenty);
  std::byte* used = blocks.take(3 * page, plenty);
  std::memset(used, 7, 3 * page);
  std::byte* kept = blocks.take(4 * page, plenty);
  blocks.give_back(kept, 4 * page);
  blocks.trim(7 * page);
  EXPECT_EQ(blocks.mapped(), 7 * page);
  blocks.trim(6 * page - 100);
  EXPECT_EQ(blocks.mapped(), 5 * page) << "whole pages, and no more than have to";
  blocks.trim(0);
  EXPECT_EQ(blocks.mapped(), 3 * page);
  EXPECT_TRUE(holds(used, 3 * page, 7));
  blocks.give_back(used, 3 * page);
}

TEST(PageBlocks, never_maps_more_than_its_limit_while_what_is_in_use_fits) {
  PageBlocks blocks(plenty);
  constexpr std::uint64_t limit = 100 * page;
  std::mt19937_64 random(3);
  struct Taken {
    std::byte* block;
    std::uint64_t bytes;
    int value;
  };
  std::vector<Taken> taken;
  std::uint64_t in_use = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t bytes = 1 + random() % (12 * page);
    if (random() % 2 == 0 && in_use + PageBlocks::rounded(bytes) <= limit) {
      const int value = static_cast<int>(random() % 256);
      std::byte* block = blocks.take(bytes, limit);
      std::memset(block, value, bytes);
      taken.push_back({block, bytes, value});
      in_use += PageBlocks::rounded(bytes);
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [block, size, value] = taken.back();
      EXPECT_TRUE(holds(block, size, value));
      blocks.give_back(block, size);
      in_use -= PageBlocks::rounded(size);
      taken.pop_back();
    }
    ASSERT_LE(blocks.mapped(), limit);
    ASSERT_GE(blocks.mapped(), in_use);
  }
  for (const Taken& each : taken) blocks.give_back(each.block, each.bytes);
  blocks.trim(0);
  EXPECT_EQ(blocks.mapped(), 0u);
}

TEST(PageBlocks, threads_share_the_limit) {
  PageBlocks blocks(plenty);
  constexpr std::uint64_t limit = 40 * page;  // each of four threads uses at most ten pages
  std::atomic<bool> over{false};
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 5000; ++i) {
      const std::uint64_t bytes = 1 + random() % (10 * page);
      std::byte* block = blocks.take(bytes, limit);
      block[0] = block[bytes - 1] = static_cast<std::byte>(seed);
      if (blocks.mapped() > limit) over = true;
      if (std::to_integer<std::uint64_t>(block[0]) != seed ||
          std::to_integer<std::uint64_t>(block[bytes - 1]) != seed) {
        over = true;
      }
      blocks.give_back(block, bytes);
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 1; i <= 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(over);
}

}  // namespace
}  // namespace terrace
