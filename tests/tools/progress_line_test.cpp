#include "tools/progress_line.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr Looks ascii{};
constexpr Looks unicode{.colours = false, .utf8 = true};

RunState half_way() {
  RunState state;
  state.step = 40;
  state.last_step = 80;
  state.loss = 3.21546;
  state.tokens_per_second = 1523;
  state.seconds_left = 65;
  state.used = {0.83, 0.6, 0.97};
  state.stall_share = 0.07;
  state.main_stall = StallCause::nvme_to_host;
  return state;
}

TEST(ProgressLine, says_everything_where_there_is_room) {
  EXPECT_EQ(progress_line(half_way(), 200, unicode),
            "step 40/80 ▕█████     ▏  loss 3.2155  1523 tokens/s  ETA 1m05s  device ▕███▍▏ 83%  host ▕██▍ ▏ 60%"
            "  nvme ▕███▉▏ 97%  stall 7% nvme→host");
}

TEST(ProgressLine, keeps_to_ascii_where_there_is_no_more) {
  EXPECT_EQ(progress_line(half_way(), 200, ascii),
            "step 40/80 [#####     ]  loss 3.2155  1523 tokens/s  ETA 1m05s  device [### ] 83%  host [##  ] 60%"
            "  nvme [####] 97%  stall 7% nvme->host");
}

TEST(ProgressLine, is_never_wider_than_the_terminal) {
  for (const Looks looks : {ascii, unicode}) {
    for (int columns = 0; columns < 160; ++columns) {
      EXPECT_LE(width_of(progress_line(half_way(), columns, looks)), columns);
    }
  }
}

TEST(ProgressLine, gives_up_the_least_important_first) {
  const std::vector<std::string> in_order{"▕███▍▏", "▕█████     ▏", "nvme→host", "tokens/s", "nvme", "host",
                                          "device", "ETA",          "stall",     "loss",     "step"};
  std::size_t gone = 0;
  for (int columns = 160; columns >= 0; --columns) {
    const std::string line = progress_line(half_way(), columns, unicode);
    while (gone < in_order.size() && line.find(in_order[gone]) == std::string::npos) ++gone;
    for (std::size_t rest = gone; rest < in_order.size(); ++rest) {
      EXPECT_THAT(line, HasSubstr(in_order[rest])) << columns;
    }
  }
  EXPECT_EQ(gone, in_order.size());
}

TEST(ProgressLine, shows_the_tiers_at_80_columns) {
  EXPECT_EQ(progress_line(half_way(), 78, unicode),
            "step 40/80  loss 3.2155  ETA 1m05s  device 83%  host 60%  nvme 97%  stall 7%");
}

TEST(ProgressLine, leaves_out_a_tier_that_there_is_not) {
  RunState state = half_way();
  state.used = {0.5, 0.5, std::nullopt};
  state.main_stall.reset();
  EXPECT_THAT(progress_line(state, 200, unicode), Not(HasSubstr("nvme")));
  state.used = {};
  EXPECT_EQ(progress_text(state), "step 40/80  loss 3.2155  1523 tokens/s  ETA 1m05s  stall 7%");
}

TEST(ProgressLine, colours_a_tier_by_how_full_it_is) {
  const std::string line = progress_line(half_way(), 200, {.colours = true, .utf8 = true});
  EXPECT_THAT(line, HasSubstr("\x1b[33m83%\x1b[0m"));
  EXPECT_THAT(line, HasSubstr("\x1b[32m60%\x1b[0m"));
  EXPECT_THAT(line, HasSubstr("\x1b[31m97%\x1b[0m"));
  EXPECT_THAT(line, HasSubstr("stall \x1b[33m7%\x1b[0m"));
}

TEST(ProgressLine, is_plain_in_a_file) {
  EXPECT_EQ(progress_text(half_way()),
            "step 40/80  loss 3.2155  1523 tokens/s  ETA 1m05s  device 83%  host 60%  nvme 97%  stall 7% nvme→host");
}

}  // namespace
}  // namespace terrace
