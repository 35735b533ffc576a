#include "tools/stolen_time.h"

#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

TEST(StolenTime, is_what_the_system_counts_of_all_cores) {
  TemporaryFolder machine;
  machine.write("proc/stat", "cpu  10 20 30 40 50 60 70 800 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\n");
  EXPECT_DOUBLE_EQ(stolen_core_seconds(machine.path()), 800.0 / static_cast<double>(::sysconf(_SC_CLK_TCK)));
}

TEST(StolenTime, is_none_where_the_system_does_not_say) {
  TemporaryFolder machine;
  EXPECT_EQ(stolen_core_seconds(machine.path()), 0);
  machine.write("proc/stat", "cpu  10 20 30 40\n");
  EXPECT_EQ(stolen_core_seconds(machine.path()), 0);
  machine.write("proc/stat", "intr 1 2 3 4 5 6 7 8 9\n");
  EXPECT_EQ(stolen_core_seconds(machine.path()), 0);
}

TEST(StolenTime, is_a_share_of_what_was_measured_and_none_of_nothing) {
  StolenTime stolen;
  EXPECT_EQ(stolen.share(), 0);
  EXPECT_EQ(stolen.during([] { return 7; }), 7);
  EXPECT_GE(stolen.share(), 0);
  EXPECT_LE(stolen.share(), 1);
}

}  // namespace
}  // namespace terrace
