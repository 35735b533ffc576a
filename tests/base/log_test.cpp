#include "base/log.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::info); }
  void TearDown() override { set_log_level(LogLevel::info); }

  /// A key that no test before this one used: what was logged once stays so until the process ends.
  static std::string new_key() {
    static int count = 0;
    return "log_test." + std::to_string(++count);
  }

  /// What `act` writes to standard error.
  template <typename Act>
  static std::string written_by(Act act) {
    testing::internal::CaptureStderr();
    act();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(Log, writes_one_line_with_the_level_to_standard_error) {
  testing::internal::CaptureStdout();
  const std::string text = written_by([] { log(LogLevel::warning, "no io_uring here"); });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_NE(text.find("terrace warning: no io_uring here\n"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST_F(Log, takes_braces_and_percents_as_they_are) {
  const std::string text = written_by([] { log(LogLevel::info, "{} {0} %s %v {"); });
  EXPECT_NE(text.find(": {} {0} %s %v {\n"), std::string::npos) << text;
}

TEST_F(Log, drops_what_is_below_the_level) {
  const auto log_all = [] {
    for (const LogLevel level :
         {LogLevel::trace, LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error, LogLevel::off}) {
      log(level, "at_" + std::string(log_level_name(level)));
    }
  };
  const std::string by_default = written_by(log_all);
  EXPECT_EQ(by_default.find("at_debug"), std::string::npos);
  EXPECT_NE(by_default.find("at_info"), std::string::npos);
  EXPECT_NE(by_default.find("at_error"), std::string::npos);
  EXPECT_EQ(by_default.find("at_off"), std::string::npos);
  set_log_level(LogLevel::trace);
  EXPECT_NE(written_by(log_all).find("at_trace"), std::string::npos);
  set_log_level(LogLevel::off);
  EXPECT_EQ(written_by(log_all), "");
}

TEST_F(Log, once_logs_a_key_once_from_many_threads) {
  const std::string key = new_key();
  const std::string text = written_by([&] {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&] {
        for (int round = 0; round < 100; ++round) log_once(key, LogLevel::info, "said");
      });
    }
    for (std::thread& thread : threads) thread.join();
    log_once(new_key(), LogLevel::info, "another");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
  EXPECT_NE(text.find("said"), std::string::npos);
  EXPECT_NE(text.find("another"), std::string::npos);
}

TEST_F(Log, once_does_not_count_what_was_dropped) {
  const std::string key = new_key();
  EXPECT_EQ(written_by([&] { log_once(key, LogLevel::debug, "hidden"); }), "");
  set_log_level(LogLevel::debug);
  EXPECT_NE(written_by([&] { log_once(key, LogLevel::debug, "shown"); }).find("shown"), std::string::npos);
}

TEST_F(Log, level_names_are_read_back) {
  for (const LogLevel level :
       {LogLevel::trace, LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error, LogLevel::off}) {
    EXPECT_EQ(log_level_from_name(log_level_name(level)), level);
  }
  EXPECT_EQ(log_level_from_name("loud"), std::nullopt);
}

}  // namespace
}  // namespace terrace
