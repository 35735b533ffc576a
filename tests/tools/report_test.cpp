#include "tools/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Report stalled() {
  Report report;
  report.steps = report.planned_steps = 5;
  report.tokens = 1000;
  report.seconds = 100;
  report.account = Account{.seconds = 100,
                           .computation_seconds = 60,
                           .update_seconds = 6,
                           .stall_seconds_by_cause = {},
                           .bound = "nvme→host",
                           .reason = "34% of the time was spent waiting for bytes from NVMe",
                           .suggestion = "raise host.memory (now 180MiB)"};
  report.account->stall_seconds_by_cause[index_of(StallCause::nvme_to_host)] = 34;
  return report;
}

TEST(Report, says_where_the_time_went_and_what_would_help) {
  EXPECT_THAT(to_text(stalled()),
              HasSubstr("\nthe steps' time       share\n"
                        "  computation           60%  1m00s\n"
                        "  updates                6%   6.0s\n"
                        "  waiting: nvme→host    34%    34s\n"
                        "bound by nvme→host: 34% of the time was spent waiting for bytes from NVMe\n"
                        "to go faster, raise host.memory (now 180MiB)\n"));
}

TEST(Report, leaves_out_what_there_is_nothing_to_say_about) {
  Report report = stalled();
  report.account->suggestion.clear();
  report.account->update_seconds = 0;
  EXPECT_THAT(to_text(report), Not(HasSubstr("to go faster")));
  EXPECT_THAT(to_text(report), Not(HasSubstr("updates")));
  report.account.reset();
  EXPECT_THAT(to_text(report), Not(HasSubstr("bound by")));
}

TEST(Report, has_the_account_in_json) {
  const auto run = nlohmann::json::parse(to_json(stalled()))["cases"][0];
  EXPECT_EQ(run["account"]["bound"], "nvme→host");
  EXPECT_EQ(run["account"]["computation_seconds"], 60);
  EXPECT_EQ(run["account"]["suggestion"], "raise host.memory (now 180MiB)");
}

TEST(Report, says_what_budgets_would_have_done) {
  Report report = stalled();
  report.usage.chunk_bytes = 4 << 20;
  report.usage.tiers[index_of(Tier::device)].needed = (38 << 20) + 576;
  report.usage.tiers[index_of(Tier::host)].needed = 178 << 20;
  EXPECT_THAT(to_text(report),
              HasSubstr("this run needs device.memory = \"39846464B\" (38.00MiB), not a byte less, with "
                        "placement.chunk = \"4MiB\"; host.memory = \"178MiB\" is enough\n"));
  report.usage.block_bytes = 128 << 10;
  EXPECT_THAT(to_text(report), HasSubstr("placement.chunk = \"4MiB\"; host.memory"));
  report.usage.block_bytes = 256 << 10;
  EXPECT_THAT(to_text(report), HasSubstr("placement.chunk = \"4MiB\" and io.block = \"256KiB\"; host.memory"));
  report.usage.laid_out_by_use = true;
  EXPECT_THAT(to_text(report), HasSubstr("io.block = \"256KiB\" and placement.order = \"use\"; host.memory"));
  report.device_is_emulated = false;
  EXPECT_THAT(to_text(report), HasSubstr("(38.00MiB) or less, with placement.chunk"));
  const auto run = nlohmann::json::parse(to_json(report))["cases"][0];
  EXPECT_EQ(run["chunk_bytes"], 4 << 20);
  EXPECT_EQ(run["laid_out_by_use"], true);
  EXPECT_EQ(run["tiers"]["device"]["needed_bytes"], (38 << 20) + 576);
  EXPECT_EQ(run["tiers"]["host"]["needed_bytes"], 178 << 20);
  report.tokens = 0;
  EXPECT_THAT(to_text(report), Not(HasSubstr("this run needs"))) << "no step has told";
}

TEST(Report, says_what_of_the_chunks_holds_nothing) {
  Report report = stalled();
  EXPECT_THAT(to_text(report), Not(HasSubstr("holds nothing")));
  report.usage.chunk_room_bytes = 400 << 20;
  report.usage.chunk_wasted_bytes = 2 << 20;
  EXPECT_THAT(to_text(report), HasSubstr("\nchunks take 400MiB where they rest; 2MiB of it (0.5%) holds nothing\n"));
  const auto run = nlohmann::json::parse(to_json(report))["cases"][0];
  EXPECT_EQ(run["chunk_room_bytes"], 400 << 20);
  EXPECT_EQ(run["chunk_wasted_bytes"], 2 << 20);
}

TEST(Report, says_how_long_building_took_and_what_the_process_held) {
  Report report = stalled();
  report.parameters = 1000;
  report.state_bytes = 16000;
  report.build_seconds = 51;
  EXPECT_THAT(to_text(report), HasSubstr("\n1000 parameters, training state 15.62KiB, built in 51s\n"));
  EXPECT_THAT(to_text(report), Not(HasSubstr("the process held"))) << "where the machine does not say";
  report.peak_resident_bytes = std::uint64_t{6} << 30U;
  EXPECT_THAT(to_text(report), HasSubstr("\nthe process held at most 6GiB of memory\n"));
  const auto run = nlohmann::json::parse(to_json(report))["cases"][0];
  EXPECT_EQ(run["build_seconds"], 51);
  EXPECT_EQ(run["peak_resident_bytes"], std::uint64_t{6} << 30U);
}

TEST(Report, has_colours_for_headings_only_where_they_are_asked_for) {
  EXPECT_THAT(to_text(stalled()), Not(HasSubstr("\x1b")));
  const std::string text = to_text(stalled(), {.colours = true, .utf8 = true});
  EXPECT_THAT(text, HasSubstr("\x1b[1mmoved"));
  EXPECT_THAT(text, HasSubstr("\x1b[1mthe steps' time"));
}

TEST(Report, says_plainly_that_nothing_was_left_to_do) {
  Report report;
  report.steps = report.resumed_after = 40;
  report.planned_steps = 5;
  report.loss = 2.5;
  EXPECT_THAT(to_text(report), ::testing::StartsWith("nothing was left to do: resumed after step 40, and the run ends "
                                                     "after step 5; last loss 2.5000\n"));
}

}  // namespace
}  // namespace terrace
