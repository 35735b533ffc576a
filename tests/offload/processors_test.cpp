// Threads run where they are bound to, and where they did before when that is over. What the system refuses is said
// once.

#include "offload/processors.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fallback.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::Field;
using testing::HasSubstr;

template <class Work>
void in_a_thread(Work work) {
  std::thread(work).join();
}

TEST(Processors, are_written_as_ranges) {
  EXPECT_EQ(ranges_of({}), "");
  EXPECT_EQ(ranges_of({3}), "3");
  EXPECT_EQ(ranges_of({4, 5, 6, 7, 12, 13, 15}), "4-7,12-13,15");
}

TEST(Processors, a_thread_runs_on_those_that_it_is_bound_to_and_no_other_does) {
  const Processors all = processors_of_this_thread();
  ASSERT_FALSE(all.empty());
  in_a_thread([&] {
    bind_this_thread({all.back()});
    EXPECT_EQ(processors_of_this_thread(), Processors{all.back()});
  });
  EXPECT_EQ(processors_of_this_thread(), all);
}

TEST(Processors, a_thread_that_was_bound_for_a_while_runs_where_it_did_before) {
  in_a_thread([] {
    const Processors all = processors_of_this_thread();
    {
      const BoundThread bound({all.front()});
      EXPECT_EQ(processors_of_this_thread(), Processors{all.front()});
    }
    EXPECT_EQ(processors_of_this_thread(), all);
  });
}

TEST(Processors, none_leave_a_thread_where_it_is) {
  const Processors all = processors_of_this_thread();
  bind_this_thread({});
  const BoundThread bound({});
  EXPECT_EQ(processors_of_this_thread(), all);
}

TEST(Processors, a_binding_that_is_refused_is_a_fallback_and_the_thread_runs_where_it_did) {
  const Processors all = processors_of_this_thread();
  bind_this_thread({100'000});
  { const BoundThread bound({100'000}); }
  EXPECT_EQ(processors_of_this_thread(), all);
  EXPECT_THAT(noted_fallbacks(),
              Contains(AllOf(Field(&Fallback::what, HasSubstr("may run on cores that computation has")),
                             Field(&Fallback::reason, HasSubstr("to hardware threads 100000 failed: ")))));
}

}  // namespace
}  // namespace terrace
