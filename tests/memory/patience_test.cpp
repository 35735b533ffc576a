// An update that nobody waits for yet does not take the room of what the device uses sooner.

#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"

namespace terrace {
namespace {

using Call = SimulatedDriver::Call;

/// Five chunks rest on NVMe and the host has room for three. The device uses them in their order, and the update has
/// made the first three, which the device has not come to.
class Patience : public testing::Test {
 protected:
  Patience() : world_(8, 3, 16, 4), chunks_(world_.chunks(5, nvme)) {
    world_.learn(reads(chunks_));
    world_.run();
    for (const ChunkId chunk : chunks_) world_.set_update_queued(chunk, true);
    world_.announce(chunks_);
    for (int i = 0; i < 3; ++i) {
      world_.use(chunks_[i], host, writing);
      world_.set_update_queued(chunks_[i], true);  // so that the device is brought none of them yet
    }
    world_.run();
  }

  bool first_three_are_there() const {
    for (int i = 0; i < 3; ++i) {
      if (world_.state(chunks_[i], host) != CopyState::valid) return false;
    }
    return true;
  }

  PrefetchWorld world_;
  const std::vector<ChunkId> chunks_;
};

TEST_F(Patience, waits_while_all_that_is_there_is_used_sooner) {
  ASSERT_TRUE(first_three_are_there());
  const Call& update = world_.acquire_patiently({{chunks_[3], host, writing}});
  world_.run();
  EXPECT_TRUE(update.waiting());
  EXPECT_TRUE(first_three_are_there());
}

TEST_F(Patience, ends_when_the_device_has_used_what_was_there) {
  const Call& update = world_.acquire_patiently({{chunks_[3], host, writing}});
  world_.run();
  ASSERT_TRUE(update.waiting());
  world_.use(chunks_[0], device, reading);
  world_.run();
  EXPECT_TRUE(update.granted());
}

TEST_F(Patience, ends_when_somebody_waits_for_updates) {
  const Call& update = world_.acquire_patiently({{chunks_[3], host, writing}});
  world_.run();
  ASSERT_TRUE(update.waiting());
  world_.set_updates_awaited(true);
  world_.run();
  EXPECT_TRUE(update.granted());
}

TEST_F(Patience, ends_when_another_waits_behind) {
  const Call& update = world_.acquire_patiently({{chunks_[3], host, writing}});
  world_.run();
  ASSERT_TRUE(update.waiting());
  const Call& other = world_.acquire({{chunks_[4], host, reading}});
  world_.run();
  EXPECT_TRUE(update.granted());
  EXPECT_TRUE(other.granted() || other.waiting());
}

TEST_F(Patience, is_none_while_somebody_waits_for_updates) {
  world_.set_updates_awaited(true);
  const Call& update = world_.acquire_patiently({{chunks_[3], host, writing}});
  world_.run();
  EXPECT_TRUE(update.granted());
}

}  // namespace
}  // namespace terrace
