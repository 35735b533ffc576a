// The program may be far ahead of the device: what leaves and what comes waits for the last use of its own chunk, and
// of the room that it takes, and not for all that has been issued since.
#include "memory/use_fences.h"

#include <chrono>
#include <cstdint>
#include <future>

#include <gtest/gtest.h>

#include "memory/access_stream.h"
#include "offload/emulated_computation.h"
#include "offload/emulated_device.h"
#include "tests/memory/cuda_behind.h"

namespace terrace {
namespace {

class UseFencesOnCuda : public CudaBehind {};

TEST_F(UseFencesOnCuda, a_use_has_ended_before_what_was_issued_after_it) {
  UseFences uses(*device_);
  const std::uint64_t first = uses.issued();
  uses.note_point();
  fall_behind();
  const std::uint64_t second = uses.issued();
  uses.note_point();
  EXPECT_TRUE(device_->reached(uses.after(0)));
  device_->wait(uses.after(first));
  EXPECT_FALSE(device_->reached(uses.after(second)));
  const std::uint64_t third = uses.issued();
  EXPECT_FALSE(device_->reached(uses.after(third))) << "a point is noted where there is none behind it";
  catch_up();
  for (const std::uint64_t use : {first, second, third}) device_->wait(uses.after(use));
}

TEST_F(UseFencesOnCuda, points_that_are_many_and_reached_are_forgotten_and_their_uses_have_ended) {
  UseFences uses(*device_);
  const std::uint64_t first = uses.issued();
  for (int i = 0; i < 100; ++i) {
    uses.issued();
    uses.note_point();
    driver_->synchronize(compute_);
  }
  EXPECT_EQ(uses.after(first), Fence{});
  EXPECT_NE(uses.after(uses.issued()), Fence{});
}

TEST(UseFences, have_ended_where_nothing_is_computed_behind_the_program_and_end_in_turn_where_something_is) {
  EmulatedDevice device(1 << 20);
  UseFences uses(device);
  EmulatedComputation& computation = EmulatedComputation::of_this_process();
  computation.wait();
  uses.note_point();
  EXPECT_TRUE(device.reached(uses.after(uses.issued())));
  computation.queue(0.001);
  const std::uint64_t first = uses.issued();
  uses.note_point();
  const std::int64_t first_ends_ns = computation.ends_ns();
  computation.queue(0.001);
  EXPECT_EQ(static_cast<std::int64_t>(uses.after(first)), first_ends_ns);
  EXPECT_EQ(static_cast<std::int64_t>(uses.after(uses.issued())), computation.ends_ns());
}

/// Chunks of a slot each, which rest on the host.
class ChunksBehind : public CudaBehind {
 protected:
  ChunkId add() { return stream_.add_chunk(Kind::parameter, count_++, granule, Tier::host); }
  void use(ChunkId chunk, Access mode = Access::read) {
    const ChunkAccess access{chunk, Tier::device, mode};
    stream_.acquire({&access, 1});
  }
  /// Whether the chunk can be had although the device is behind.
  bool is_there_meanwhile(ChunkId chunk, Tier tier) {
    auto there = std::async(std::launch::async, [this, chunk, tier] {
      const ChunkAccess access{chunk, tier, Access::read};
      stream_.acquire({&access, 1});
    });
    const bool meanwhile = there.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    catch_up();
    there.get();
    return meanwhile;
  }

  HostArena arena_{granule, TransferService::staging_blocks + 16};
  Budget host_{Tier::host, arena_.capacity_bytes()};
  Budget nvme_{Tier::nvme, 0};
  AccessStream stream_{{&device_->budget(), &host_, &nvme_}, *device_, arena_, nullptr, nullptr, {}};
  std::uint32_t count_ = 0;
};

TEST_F(ChunksBehind, a_chunk_comes_into_room_whose_last_use_has_ended) {
  const ChunkId first = add();
  use(first);
  for (std::uint64_t i = 1; i < slots; ++i) use(add());
  fall_behind();
  EXPECT_TRUE(is_there_meanwhile(add(), Tier::device)) << "in the room of the first";
}

TEST_F(ChunksBehind, a_chunk_comes_into_free_room_whatever_has_left_last) {
  const ChunkId first = add();
  fall_behind();
  use(first);
  stream_.remove_chunk(first);
  EXPECT_TRUE(is_there_meanwhile(add(), Tier::device)) << "beside the room of the first";
}

TEST_F(ChunksBehind, a_chunk_that_needs_the_room_of_one_that_is_used_behind_the_program_comes_when_that_has_ended) {
  const ChunkId first = add();
  for (std::uint64_t i = 1; i < slots; ++i) use(add(), Access::write);
  fall_behind();
  use(first);
  stream_.remove_chunk(first);
  const ChunkAccess access{add(), Tier::device, Access::read};
  auto there = std::async(std::launch::async, [&] { stream_.acquire({&access, 1}); });
  EXPECT_EQ(there.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  catch_up();
  there.get();
}

TEST_F(ChunksBehind, a_chunk_leaves_whose_last_use_has_ended) {
  const ChunkId first = add();
  use(first, Access::write);
  use(add());
  fall_behind();
  use(add());
  EXPECT_TRUE(is_there_meanwhile(first, Tier::host));
}

TEST_F(ChunksBehind, a_chunk_that_is_used_behind_the_program_leaves_when_that_has_ended) {
  const ChunkId first = add();
  use(first);
  fall_behind();
  use(first, Access::write);
  const ChunkAccess access{first, Tier::host, Access::read};
  auto there = std::async(std::launch::async, [&] { stream_.acquire({&access, 1}); });
  EXPECT_EQ(there.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  catch_up();
  there.get();
}

}  // namespace
}  // namespace terrace
