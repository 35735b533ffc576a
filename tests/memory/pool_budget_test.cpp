#include "memory/pool_budget.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/memory/stream_world.h"

namespace terrace {
namespace {

constexpr std::uint64_t MiB = 1024 * 1024;
constexpr std::uint64_t granule = 64 * 1024;
constexpr std::uint64_t segment = 4 * MiB;
constexpr std::uint64_t chunk = 4 * MiB;
constexpr int stream_one = 1;
constexpr int stream_two = 2;

/// Takes a segment a block, and keeps it when the block is given back, for a block no larger.
class Pool final : public SegmentPool {
 public:
  std::uint64_t reserved_bytes() override { return in_use_.load() + kept_bytes(); }
  std::uint64_t largest_kept_bytes() override { return kept_.empty() ? 0 : *kept_.rbegin(); }
  void give_back_kept() override {
    kept_.clear();
    ++give_backs;
  }

  /// Returns the bytes of the segment that serves the block.
  std::uint64_t take(std::uint64_t bytes) {
    const auto fits = kept_.lower_bound(bytes);
    const std::uint64_t taken = fits != kept_.end() ? *fits : bytes;
    if (fits != kept_.end()) {
      kept_.erase(fits);
    }
    in_use_ += taken;
    on_take();
    return taken;
  }
  void free(std::uint64_t bytes) {
    in_use_ -= bytes;
    kept_.insert(bytes);
  }

  std::function<void()> on_take = [] {};
  int give_backs = 0;

 private:
  std::uint64_t kept_bytes() const {
    std::uint64_t bytes = 0;
    for (const std::uint64_t each : kept_) bytes += each;
    return bytes;
  }

  std::atomic<std::uint64_t> in_use_{0};
  std::multiset<std::uint64_t> kept_;
};

class PoolBudgetTest : public testing::Test {
 protected:
  explicit PoolBudgetTest(std::uint64_t device_bytes = 128 * MiB)
      : world_({.granule_bytes = granule, .device_bytes = device_bytes, .host_bytes = 256 * MiB, .nvme_extents = 1}) {}

  std::uint64_t call(std::uint64_t bytes, int stream = stream_one) {
    return budget_.call({.most_growth = bytes, .kept_block_needed = bytes, .stream = &streams_[stream]},
                        [&] { return pool_.take(bytes); });
  }
  std::uint64_t counted() { return world_.device.budget().used(Kind::other); }
  std::vector<ChunkId> fill_device_with_chunks() {
    std::vector<ChunkId> chunks;
    while (world_.device.budget().free() >= chunk) {
      chunks.push_back(world_.stream.add_chunk(Kind::parameter, 0, chunk, Tier::host));
      world_.acquire(chunks.back(), Tier::device);
    }
    return chunks;
  }

  StreamWorld world_;
  Pool pool_;
  PoolBudget budget_{world_.stream, pool_};
  const int streams_[3] = {};
};

TEST_F(PoolBudgetTest, counts_what_the_pool_reserves_and_no_more_than_a_little_ahead) {
  std::uint64_t blocks = 0;
  for (int i = 0; i < 20; ++i) {
    blocks += call(segment);
    ASSERT_GE(counted(), pool_.reserved_bytes());
    ASSERT_LE(counted(), pool_.reserved_bytes() + PoolBudget::most_ahead_bytes);
  }
  EXPECT_EQ(pool_.reserved_bytes(), blocks);
}

TEST_F(PoolBudgetTest, counts_before_the_pool_grows) {
  std::uint64_t least_ahead = ~std::uint64_t{0};
  pool_.on_take = [&] { least_ahead = std::min(least_ahead, counted() - pool_.reserved_bytes()); };
  for (int i = 0; i < 30; ++i) call(segment);
  EXPECT_LE(least_ahead, world_.device.budget().capacity()) << "less was counted than reserved";
}

TEST_F(PoolBudgetTest, chunks_leave_for_what_the_pool_may_grow_by) {
  fill_device_with_chunks();
  const std::uint64_t chunks_before = world_.device.budget().used(Kind::parameter);
  call(20 * MiB);
  EXPECT_LE(world_.device.budget().used(Kind::parameter), chunks_before - 16 * MiB);
  EXPECT_LE(world_.device.budget().peak(), world_.device.budget().capacity());
  world_.check_invariants();
}

TEST_F(PoolBudgetTest, no_chunk_leaves_for_a_call_that_is_served_from_what_is_kept) {
  pool_.free(call(60 * MiB));
  fill_device_with_chunks();
  const std::uint64_t chunks_before = world_.device.budget().used(Kind::parameter);
  for (int i = 0; i < 10; ++i) pool_.free(call(60 * MiB));
  EXPECT_EQ(world_.device.budget().used(Kind::parameter), chunks_before);
}

TEST_F(PoolBudgetTest, with_several_streams_what_is_kept_is_not_relied_on) {
  pool_.free(call(60 * MiB));
  call(segment, stream_two);
  fill_device_with_chunks();
  const std::uint64_t chunks_before = world_.device.budget().used(Kind::parameter);
  call(60 * MiB);
  EXPECT_LT(world_.device.budget().used(Kind::parameter), chunks_before);
}

TEST_F(PoolBudgetTest, gives_back_what_the_pool_did_not_grow_by) {
  pool_.free(call(60 * MiB));
  call(segment, stream_two);
  call(60 * MiB);  // served from what is kept, though 60 MiB more were reserved
  call(segment, stream_two);
  EXPECT_LE(counted(), pool_.reserved_bytes() + PoolBudget::most_ahead_bytes);
}

TEST_F(PoolBudgetTest, the_pool_gives_back_what_it_keeps_where_a_chunk_finds_no_room) {
  pool_.free(call(100 * MiB));
  const ChunkId large = world_.stream.add_chunk(Kind::parameter, 0, 80 * MiB, Tier::host);
  world_.acquire(large, Tier::device);
  EXPECT_EQ(pool_.give_backs, 1);
  EXPECT_EQ(pool_.reserved_bytes(), 0U);
  EXPECT_LE(world_.device.budget().peak(), world_.device.budget().capacity());
}

TEST_F(PoolBudgetTest, the_pool_gives_back_what_it_keeps_where_a_larger_block_finds_no_room) {
  pool_.free(call(70 * MiB));
  call(90 * MiB);
  EXPECT_EQ(pool_.give_backs, 1);
  EXPECT_EQ(pool_.reserved_bytes(), 90 * MiB);
}

TEST_F(PoolBudgetTest, what_does_not_fit_is_refused_and_nothing_is_counted_for_it) {
  const std::uint64_t used = call(100 * MiB);
  const std::uint64_t counted_before = counted();
  EXPECT_THROW(call(60 * MiB), OutOfMemory);
  EXPECT_LE(counted(), counted_before);
  pool_.free(used);
  EXPECT_EQ(call(100 * MiB), 100 * MiB);
}

TEST_F(PoolBudgetTest, a_request_for_the_host_takes_nothing_from_the_pool) {
  pool_.free(call(segment));
  EXPECT_THROW(world_.stream.allocate(world_.host.capacity() + 1, Kind::other, Tier::host), OutOfMemory);
  EXPECT_EQ(pool_.give_backs, 0);
}

TEST_F(PoolBudgetTest, uncounted_calls_are_not_counted_later) {
  budget_.call_uncounted([&] { return pool_.take(64 * MiB); });
  EXPECT_EQ(counted(), 0U);
  call(segment);
  EXPECT_LE(counted(), segment + PoolBudget::most_ahead_bytes);
}

TEST(PoolBudget, what_the_pool_had_before_is_not_counted) {
  StreamWorld world({.granule_bytes = granule, .device_bytes = 16 * MiB, .host_bytes = 16 * MiB, .nvme_extents = 1});
  Pool pool;
  pool.take(64 * MiB);
  PoolBudget budget(world.stream, pool);
  budget.call({.most_growth = MiB}, [&] { return pool.take(MiB); });
  EXPECT_LE(world.device.budget().used(Kind::other), 16 * MiB);
}

TEST(PoolBudget, nothing_is_counted_after_its_end) {
  StreamWorld world({.granule_bytes = granule, .device_bytes = 64 * MiB, .host_bytes = 16 * MiB, .nvme_extents = 1});
  Pool pool;
  {
    PoolBudget budget(world.stream, pool);
    budget.call({.most_growth = segment}, [&] { return pool.take(segment); });
  }
  EXPECT_EQ(world.device.budget().used(Kind::other), 0U);
  EXPECT_THROW(world.stream.allocate(65 * MiB, Kind::other), OutOfMemory);
}

TEST_F(PoolBudgetTest, what_else_is_kept_makes_way_before_the_pool_grows) {
  StreamWorld world({.granule_bytes = granule, .device_bytes = 64 * MiB, .host_bytes = 16 * MiB, .nvme_extents = 1});
  Pool pool;
  std::vector<std::string> order;
  pool.on_take = [&] { order.push_back("grows"); };
  PoolBudget budget(world.stream, pool, [&] { order.push_back("makes way"); });
  budget.call({.most_growth = segment}, [&] { return pool.take(segment); });
  EXPECT_THAT(order, testing::ElementsAre("makes way", "grows"));
}

TEST_F(PoolBudgetTest, threads_and_chunks_together_never_exceed_the_budget) {
  constexpr int rounds = 200;
  std::atomic<bool> within = true;
  pool_.on_take = [&] { within = within && counted() >= pool_.reserved_bytes(); };
  const std::vector<ChunkId> chunks = fill_device_with_chunks();
  std::vector<std::thread> threads;
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      for (int i = 0; i < rounds; ++i) {
        const std::uint64_t bytes = (1 + static_cast<std::uint64_t>(i * 7 + id) % 12) * MiB;
        const std::uint64_t taken =
            budget_.call({.most_growth = bytes, .stream = &streams_[id]}, [&] { return pool_.take(bytes); });
        budget_.call_uncounted([&] {
          pool_.free(taken);
          return 0;
        });
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < rounds; ++i) {
      world_.acquire(chunks[static_cast<std::size_t>(i) % chunks.size()], Tier::device, Access::write);
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(within) << "less was counted than reserved";
  EXPECT_LE(world_.device.budget().peak(), world_.device.budget().capacity());
  world_.check_invariants();
}

}  // namespace
}  // namespace terrace
