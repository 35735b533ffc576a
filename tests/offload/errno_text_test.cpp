#include "offload/errno_text.h"

#include <cerrno>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(ErrnoText, has_words_and_symbol) {
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device (ENOSPC)");
  EXPECT_EQ(errno_text(123456), "unknown error (123456)");
}

}  // namespace
}  // namespace terrace
