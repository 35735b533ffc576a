#include "tools/terminal.h"

#include <cstdlib>
#include <memory>
#include <pty.h>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr Looks ascii{};
constexpr Looks unicode{.colours = false, .utf8 = true};
constexpr Looks colourful{.colours = true, .utf8 = true};

TEST(Terminal, counts_columns_and_not_bytes) {
  EXPECT_EQ(width_of(""), 0);
  EXPECT_EQ(width_of("loss 3.1"), 8);
  EXPECT_EQ(width_of("nvme→host"), 9);
  EXPECT_EQ(width_of("▕███▌▏"), 6);
  EXPECT_EQ(width_of("段 "), 3);         // wide
  EXPECT_EQ(width_of("e\u0301"), 1);     // with an accent that combines
  EXPECT_EQ(width_of("\xff\xfe a"), 4);  // no UTF-8
  EXPECT_EQ(width_of("\xe2\x86"), 2);    // cut inside a character
}

TEST(Terminal, counts_columns_whatever_the_program_s_locale_is) {
  const std::string before = std::setlocale(LC_ALL, nullptr);
  std::setlocale(LC_ALL, "C");
  EXPECT_EQ(width_of("→"), 1);
  EXPECT_STREQ(std::setlocale(LC_ALL, nullptr), "C");
  std::setlocale(LC_ALL, before.c_str());
}

TEST(Terminal, draws_a_bar_to_an_eighth_of_a_cell) {
  EXPECT_EQ(bar(0, 2, unicode), "▕  ▏");
  EXPECT_EQ(bar(0.5, 2, unicode), "▕█ ▏");
  EXPECT_EQ(bar(0.75, 2, unicode), "▕█▌▏");
  EXPECT_EQ(bar(0.9375, 2, unicode), "▕█▉▏");
  EXPECT_EQ(bar(1, 2, unicode), "▕██▏");
}

TEST(Terminal, draws_a_bar_in_ascii_where_there_is_no_more) {
  EXPECT_EQ(bar(0, 4, ascii), "[    ]");
  EXPECT_EQ(bar(0.7, 4, ascii), "[### ]");
  EXPECT_EQ(bar(1, 4, ascii), "[####]");
}

TEST(Terminal, draws_a_bar_of_one_width_whatever_the_share) {
  for (const Looks looks : {ascii, unicode}) {
    for (int share = -50; share <= 150; ++share) {
      EXPECT_EQ(width_of(bar(share / 100.0, 7, looks)), 9) << share;
    }
  }
}

TEST(Terminal, styles_text_only_where_there_are_colours) {
  EXPECT_EQ(styled("7%", Style::high, unicode), "7%");
  EXPECT_EQ(styled("7%", Style::plain, colourful), "7%");
  const std::string red = styled("7%", Style::high, colourful);
  EXPECT_TRUE(red.starts_with("\x1b[31m")) << red;
  EXPECT_TRUE(red.ends_with("\x1b[0m")) << red;
  EXPECT_NE(red.find("7%"), std::string::npos);
}

TEST(Terminal, spells_arrows_where_there_is_only_ascii) {
  EXPECT_EQ(in_charset("nvme→host→device", ascii), "nvme->host->device");
  EXPECT_EQ(in_charset("nvme→host", unicode), "nvme→host");
}

/// A file that is a terminal of 100 columns, and an environment of its own.
class OnATerminal : public testing::Test {
 protected:
  void SetUp() override {
    winsize size{};
    size.ws_col = 100;
    size.ws_row = 30;
    int terminal = -1;
    ASSERT_EQ(openpty(&master_, &terminal, nullptr, nullptr, &size), 0);
    out_.reset(::fdopen(terminal, "w"));
    set("TERM", "xterm");
    set("NO_COLOR", "");
    set("LC_ALL", "C.UTF-8");
  }
  void TearDown() override {
    for (const auto& [name, value] : before_) {
      value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
    }
    ::close(master_);
  }

  void set(const char* name, const char* value) {
    const char* const old = std::getenv(name);
    before_.try_emplace(name, old != nullptr ? std::optional<std::string>(old) : std::nullopt);
    ::setenv(name, value, 1);
  }

  int master_ = -1;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> out_{nullptr, &std::fclose};
  std::map<std::string, std::optional<std::string>> before_;
};

TEST_F(OnATerminal, there_are_colours_and_blocks) {
  EXPECT_TRUE(is_terminal(out_.get()));
  EXPECT_TRUE(looks_of(out_.get()).colours);
  EXPECT_TRUE(looks_of(out_.get()).utf8);
}

TEST_F(OnATerminal, no_color_of_any_value_means_none) {
  for (const char* value : {"1", "0", "false"}) {
    set("NO_COLOR", value);
    EXPECT_FALSE(looks_of(out_.get()).colours) << value;
    EXPECT_TRUE(looks_of(out_.get()).utf8) << value;
  }
}

TEST_F(OnATerminal, a_dumb_one_is_written_to_as_a_file) {
  set("TERM", "dumb");
  EXPECT_FALSE(is_terminal(out_.get()));
  EXPECT_FALSE(looks_of(out_.get()).colours);
}

TEST_F(OnATerminal, the_locale_says_whether_there_is_more_than_ascii) {
  set("LC_ALL", "C");
  EXPECT_FALSE(looks_of(out_.get()).utf8);
}

TEST_F(OnATerminal, the_width_follows_the_terminal) {
  EXPECT_EQ(columns_of(out_.get()), 100);
  winsize size{};
  size.ws_col = 40;
  ASSERT_EQ(ioctl(master_, TIOCSWINSZ, &size), 0);
  EXPECT_EQ(columns_of(out_.get()), 40);
  size.ws_col = 0;  // one that does not know
  ASSERT_EQ(ioctl(master_, TIOCSWINSZ, &size), 0);
  EXPECT_EQ(columns_of(out_.get()), 80);
}

TEST(Terminal, a_file_is_none) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  EXPECT_FALSE(is_terminal(file.get()));
  EXPECT_FALSE(looks_of(file.get()).colours);
  EXPECT_EQ(columns_of(file.get()), 80);
}

}  // namespace
}  // namespace terrace
