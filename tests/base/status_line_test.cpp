#include "base/status_line.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/log.h"

namespace terrace {
namespace {

class StatusLine : public testing::Test {
 protected:
  void TearDown() override { end_status_line(); }

  /// What `act` writes to standard error.
  template <typename Act>
  static std::string written_by(Act act) {
    testing::internal::CaptureStderr();
    act();
    return testing::internal::GetCapturedStderr();
  }

  /// What a terminal shows of it: the rows, with what was cleared gone.
  static std::vector<std::string> rows_of(const std::string& text) {
    std::vector<std::string> rows(1);
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text.compare(i, 4, "\r\x1b[K") == 0) {
        rows.back().clear();
        i += 3;
      } else if (text[i] == '\n') {
        rows.emplace_back();
      } else {
        rows.back() += text[i];
      }
    }
    return rows;
  }
};

TEST_F(StatusLine, takes_the_place_of_the_one_before) {
  const std::string text = written_by([] {
    show_status_line("step 1 of many");
    show_status_line("step 2");
  });
  EXPECT_EQ(rows_of(text), std::vector<std::string>{"step 2"});
}

TEST_F(StatusLine, stays_below_what_is_logged) {
  const std::string text = written_by([] {
    show_status_line("step 1");
    log(LogLevel::warning, "no io_uring here");
  });
  const std::vector<std::string> rows = rows_of(text);
  ASSERT_EQ(rows.size(), 2U) << text;
  EXPECT_NE(rows[0].find("terrace warning: no io_uring here"), std::string::npos) << text;
  EXPECT_EQ(rows[0].find("step"), std::string::npos) << text;
  EXPECT_EQ(rows[1], "step 1");
}

TEST_F(StatusLine, is_left_as_it_stands_when_it_ends_and_shown_no_more) {
  const std::string text = written_by([] {
    show_status_line("step 1");
    end_status_line();
    end_status_line();
    log(LogLevel::warning, "late");
  });
  const std::vector<std::string> rows = rows_of(text);
  ASSERT_EQ(rows.size(), 3U) << text;
  EXPECT_EQ(rows[0], "step 1");
  EXPECT_NE(rows[1].find("late"), std::string::npos);
  EXPECT_EQ(rows[2], "");
}

TEST_F(StatusLine, leaves_the_log_alone_where_there_is_none) {
  EXPECT_EQ(written_by([] { log(LogLevel::warning, "plain"); }).find('\r'), std::string::npos);
}

TEST_F(StatusLine, is_whole_while_many_threads_log) {
  const std::string text = written_by([] {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([] {
        for (int i = 0; i < 50; ++i) log(LogLevel::warning, "from a thread");
      });
    }
    for (int i = 0; i < 100; ++i) show_status_line("step " + std::to_string(i));
    for (std::thread& thread : threads) thread.join();
  });
  const std::vector<std::string> rows = rows_of(text);
  ASSERT_EQ(rows.size(), 201U);
  EXPECT_EQ(rows.back(), "step 99");
  for (std::size_t i = 0; i < 200; ++i) {
    EXPECT_TRUE(rows[i].ends_with("terrace warning: from a thread")) << rows[i];
  }
}

}  // namespace
}  // namespace terrace
