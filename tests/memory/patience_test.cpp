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
  world_.set_update_queued(chunks_[0], false);
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

/// The host has room for four chunks. Of two layers the parameters, p, rest on NVMe and what is updated with them, m,
/// too; the device uses p0 and p1.
class PatienceOfLayers : public testing::Test {
 protected:
  PatienceOfLayers() {
    world_.learn(reads({p_[0], p_[1], later_[0], later_[1], later_[2], later_[3]}));
    world_.run();
  }

  /// The host is full of what the device uses after the parameters.
  void fill_host() {
    for (const ChunkId chunk : later_) world_.read(chunk, host);
    for (const ChunkId chunk : later_) ASSERT_EQ(world_.state(chunk, host), CopyState::valid);
  }

  PrefetchWorld world_{1, 4, 64, 4};
  std::vector<ChunkId> m_ = world_.states(2, nvme);
  std::vector<ChunkId> p_ = world_.chunks(2, nvme);
  std::vector<ChunkId> later_ = world_.chunks(4, nvme);
};

TEST_F(PatienceOfLayers, has_none_with_what_the_device_uses_next_whatever_is_updated_with_it) {
  fill_host();
  for (const ChunkId chunk : {p_[0], m_[0], p_[1], m_[1]}) world_.set_update_queued(chunk, true);
  world_.announce({p_[0], m_[0], p_[1], m_[1]});
  for (const int layer : {0, 1}) {
    Call& update = world_.acquire_patiently({{p_[layer], host, writing}, {m_[layer], host, writing}});
    world_.run();
    ASSERT_TRUE(update.granted()) << "layer " << layer << ": all that is there is used later";
    world_.release(update);
  }
}

}  // namespace
}  // namespace terrace
