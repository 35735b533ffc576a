#include "base/fallback.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(Fallback, is_logged_and_kept_once_with_its_reason) {
  testing::internal::CaptureStderr();
  note_fallback("test: feet are used", "the horse is lame");
  note_fallback("test: feet are used", "another reason");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("test: feet are used, because the horse is lame\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("another reason"), std::string::npos) << text;
  const std::vector<Fallback> noted = noted_fallbacks();
  EXPECT_EQ(std::count_if(noted.begin(), noted.end(),
                          [](const Fallback& each) { return each.what == "test: feet are used"; }),
            1);
}

TEST(Fallback, is_kept_also_where_the_log_drops_it) {
  set_log_level(LogLevel::off);
  note_fallback("test: a quiet one", "nobody listens");
  set_log_level(LogLevel::info);
  EXPECT_EQ(noted_fallbacks().back().what, "test: a quiet one");
}

}  // namespace
}  // namespace terrace
