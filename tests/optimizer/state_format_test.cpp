#include "optimizer/state_format.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

std::size_t bytes_beside(StateFormat states, ElementType parameter) {
  return master_bytes(states, parameter) + 2 * bytes_of(moment_type(states));
}

TEST(StateFormat, has_as_many_bytes_as_its_table_says) {
  using enum ElementType;
  EXPECT_EQ(bytes_beside(state_format("float32"), bfloat16), 12u);
  EXPECT_EQ(bytes_beside(state_format("split"), bfloat16), 10u);
  EXPECT_EQ(bytes_beside(state_format("split_bfloat16"), bfloat16), 6u);
  EXPECT_EQ(bytes_beside(state_format("float32"), float32), 8u);
  EXPECT_EQ(bytes_beside(state_format("split"), float32), 8u);
  EXPECT_EQ(bytes_beside(state_format("split_bfloat16"), float32), 4u);
}

TEST(StateFormat, of_another_name_is_refused) { EXPECT_THROW(state_format("float16"), ConfigError); }

}  // namespace
}  // namespace terrace
