#include "tools/case_runner.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

struct NamedCase {
  std::string name;
  int value = 0;
};

const std::vector<NamedCase> all{{"slow", 1}, {"medium", 2}, {"fast", 3}};

TEST(Cases, are_all_wanted_where_none_is_named) {
  EXPECT_EQ(names_of(wanted_cases(all, CaseOptions{})), names_of(all));
}

TEST(Cases, keep_their_order_and_come_once_however_they_are_named) {
  const std::vector<NamedCase> wanted = wanted_cases(all, CaseOptions{{"fast", "slow", "fast"}});
  EXPECT_EQ(names_of(wanted), (std::vector<std::string>{"slow", "fast"}));
  EXPECT_EQ(wanted[1].value, 3);
}

TEST(Cases, of_another_name_are_an_error_that_lists_what_there_is) {
  try {
    wanted_cases(all, CaseOptions{{"slow", "quick"}});
    FAIL() << "a name that no case has was taken";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'quick'"), std::string::npos) << error.what();
    EXPECT_EQ(error.hint(), "the cases are slow, medium, fast");
  }
}

TEST(Cases, run_in_turn_and_a_first_look_is_not_doubled) {
  std::vector<std::size_t> ran;
  EXPECT_TRUE(run_cases({"a", "b"}, CaseOptions{{}, 2}, [&](std::size_t i, const PairOptions& options) {
    ran.push_back(i);
    EXPECT_EQ(options.pairs, 2);
    EXPECT_EQ(options.most_pairs, 2);
  }));
  EXPECT_EQ(ran, (std::vector<std::size_t>{0, 1}));
  EXPECT_TRUE(run_cases({"a"}, CaseOptions{{}, 200},
                        [&](std::size_t, const PairOptions& options) { EXPECT_EQ(options.most_pairs, 200); }));
}

}  // namespace
}  // namespace terrace
