#include "base/text.h"

#include <string>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(Text, trimmed_takes_blanks_off_the_ends_only) {
  EXPECT_EQ(trimmed(" \t a b\t"), "a b");
  EXPECT_EQ(trimmed("a"), "a");
  EXPECT_EQ(trimmed(" \t "), "");
  EXPECT_EQ(trimmed(""), "");
}

TEST(Text, excerpt_keeps_what_is_short) {
  EXPECT_EQ(excerpt("short"), "short");
  EXPECT_EQ(excerpt(std::string(80, 'x')), std::string(80, 'x'));
}

TEST(Text, excerpt_does_not_cut_a_character_in_two) {
  EXPECT_EQ(excerpt(std::string(81, 'x')), std::string(80, 'x') + "...");
  EXPECT_EQ(excerpt(std::string(79, 'x') + "\xc3\xa9y"), std::string(79, 'x') + "...");
}

}  // namespace
}  // namespace terrace
