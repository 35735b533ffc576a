#include "memory/step_clock.h"

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::int64_t second = 1'000'000'000;

TEST(StepClock, tells_the_halves_of_the_shortest_step_without_what_was_waited_for) {
  StepClock clock;
  EXPECT_EQ(clock.backward_seconds(), 0);
  clock.begin_forward({0, 0});
  clock.begin_backward({5 * second, 3});
  clock.begin_backward({6 * second, 3});  // its second op
  clock.end_step({12 * second, 4});
  EXPECT_DOUBLE_EQ(clock.forward_seconds(), 2);
  EXPECT_DOUBLE_EQ(clock.backward_seconds(), 6);
  clock.begin_forward({20 * second, 4});
  clock.begin_backward({21 * second, 4});
  clock.end_step({25 * second, 4});
  EXPECT_DOUBLE_EQ(clock.forward_seconds(), 1);
  EXPECT_DOUBLE_EQ(clock.backward_seconds(), 4);
  clock.begin_forward({30 * second, 4});
  clock.begin_backward({39 * second, 4});
  clock.end_step({40 * second, 4});
  EXPECT_DOUBLE_EQ(clock.forward_seconds(), 1) << "a longer one says nothing";
}

TEST(StepClock, knows_nothing_of_a_step_that_was_not_seen_whole) {
  StepClock clock;
  clock.begin_backward({second, 0});
  clock.end_step({2 * second, 0});
  clock.begin_forward({3 * second, 0});
  clock.end_step({4 * second, 0});
  EXPECT_EQ(clock.forward_seconds(), 0);
  EXPECT_EQ(clock.backward_seconds(), 0);
}

}  // namespace
}  // namespace terrace
