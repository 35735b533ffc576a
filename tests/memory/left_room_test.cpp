// Room is used again in the order in which it was left: who finds enough beside what was left last waits for none of
// that.
#include "memory/left_room.h"

#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "offload/emulated_device.h"

namespace terrace {
namespace {

/// Fences of the emulated device, which are moments: these are far away.
Fence far(std::int64_t number) { return static_cast<Fence>(std::numeric_limits<std::int64_t>::max() / 2 + number); }

class LeftRoomTest : public testing::Test {
 protected:
  EmulatedDevice device_{1 << 20};
  LeftRoom room_{device_};
};

TEST_F(LeftRoomTest, that_was_never_used_may_be_used_at_once) {
  EXPECT_EQ(room_.taken(0), Fence{});
  room_.left(10, Fence{});
  EXPECT_EQ(room_.taken(0), Fence{});
}

TEST_F(LeftRoomTest, that_was_left_last_is_what_is_free_as_far_as_it_fits) {
  room_.left(10, far(1));
  room_.left(10, far(2));
  room_.left(10, far(3));
  EXPECT_EQ(room_.taken(30), Fence{});
  EXPECT_EQ(room_.taken(29), far(1)) << "a part of the first is taken";
  EXPECT_EQ(room_.taken(20), far(1));
  EXPECT_EQ(room_.taken(5), far(3));
}

TEST_F(LeftRoomTest, waits_for_the_latest_of_those_whose_room_is_taken) {
  room_.left(10, far(5));
  room_.left(10, far(2));
  EXPECT_EQ(room_.taken(10), far(5));
  EXPECT_EQ(room_.taken(0), far(5)) << "not only for what left last";
}

}  // namespace
}  // namespace terrace
