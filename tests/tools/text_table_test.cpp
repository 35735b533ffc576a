#include "tools/text_table.h"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(TextTable, lists_pairs_below_titles_that_may_be_wide) {
  EXPECT_EQ(format_pairs({{"a title that is wide", ""}, {"  no", "1"}, {"  näme", "2"}}),
            "a title that is wide\n  no    1\n  näme  2\n");
}

}  // namespace
}  // namespace terrace
