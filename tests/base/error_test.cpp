#include "base/error.h"

#include <type_traits>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(Error, what_holds_the_message_and_the_hint) {
  const ConfigError error("budget is too small", "raise host.memory");
  EXPECT_STREQ(error.what(), "budget is too small\n  hint: raise host.memory");
  EXPECT_EQ(error.message(), "budget is too small");
  EXPECT_EQ(error.hint(), "raise host.memory");
}

TEST(Error, without_a_hint_what_is_the_message) {
  const IoError error("write failed");
  EXPECT_STREQ(error.what(), "write failed");
  EXPECT_EQ(error.message(), "write failed");
  EXPECT_EQ(error.hint(), "");
}

TEST(Error, keeps_its_texts_when_copied) {
  const OutOfMemory error("no room", "lower it");
  const OutOfMemory copy = error;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(copy.message(), "no room");
  EXPECT_EQ(copy.hint(), "lower it");
  static_assert(std::is_nothrow_copy_constructible_v<OutOfMemory>);
}

template <typename Derived>
class ErrorType : public testing::Test {};
using ErrorTypes = testing::Types<ConfigError, OutOfMemory, IoError, CorruptData, DistributedError, LogicError>;
TYPED_TEST_SUITE(ErrorType, ErrorTypes);

TYPED_TEST(ErrorType, is_caught_as_an_error) {
  try {
    throw TypeParam("it failed", "do this");
  } catch (const Error& error) {
    EXPECT_EQ(error.message(), "it failed");
    EXPECT_EQ(error.hint(), "do this");
  }
}

}  // namespace
}  // namespace terrace
