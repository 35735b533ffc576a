// Rates are kept from run to run, and nothing of a file that is not of this machine and this version is believed.

#include "integration/rates.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "tests/base/environment_variable.h"
#include "tests/base/temporary_folder.h"
#include "tests/base/text_of.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

Rates some_rates() {
  Rates rates;
  rates.memory = MemoryRates{1e9, 2e9, 3e9, 4e9, "2026-01-31T12:00:00Z"};
  rates.paths["/data/terrace"] = {5e9, 6e9, "io_uring", 1 << 20, 8, true, "2026-02-01T12:00:00Z"};
  rates.links["emulated"] = {7e9, 8e9, "2026-02-02T12:00:00Z"};
  return rates;
}

class RatesTest : public testing::Test {
 protected:
  RatesTest() { set_log_level(LogLevel::warning); }

  /// What it holds after a change to the text of a good file; what was logged is in `logged_`.
  Rates after(const std::string& from, const std::string& to) {
    file_.save(some_rates());
    std::string text = text_of(file_.path());
    EXPECT_THAT(text, HasSubstr(from));
    text.replace(text.find(from), from.size(), to);
    std::ofstream(file_.path()) << text;
    return load();
  }

  Rates load() {
    testing::internal::CaptureStderr();
    Rates rates = file_.load();
    logged_ = testing::internal::GetCapturedStderr();
    return rates;
  }

  static bool is_empty(const Rates& rates) { return !rates.memory && rates.paths.empty() && rates.links.empty(); }

  TemporaryFolder folder_;
  RatesFile file_{folder_.path() / "cache" / "rates.json"};
  std::string logged_;
};

TEST_F(RatesTest, come_back_as_they_were_kept) {
  file_.save(some_rates());
  const Rates rates = load();
  EXPECT_EQ(logged_, "");
  EXPECT_EQ(to_json(rates), to_json(some_rates()));
  EXPECT_EQ(std::distance(fs::directory_iterator(file_.path().parent_path()), fs::directory_iterator()), 1)
      << "nothing is left beside the file";
}

TEST_F(RatesTest, are_none_where_there_is_no_file_and_nobody_is_told) {
  EXPECT_TRUE(is_empty(load()));
  EXPECT_EQ(logged_, "");
}

TEST_F(RatesTest, of_another_machine_or_version_are_ignored_with_a_line) {
  EXPECT_TRUE(is_empty(after("\"memory_bytes\": ", "\"memory_bytes\": 1")));
  EXPECT_THAT(logged_, HasSubstr("rates.json are ignored: it was measured on another machine"));
  EXPECT_TRUE(is_empty(after("\"version\": 2", "\"version\": 1")));
  EXPECT_THAT(logged_, HasSubstr("it is of version 1"));
}

TEST_F(RatesTest, of_a_broken_file_are_ignored_with_a_line) {
  for (const auto& [from, to] :
       {std::pair{"}", ""}, std::pair{"\"paths\"", "\"pahts\""},
        std::pair{"\"read_bytes_per_second\": ", "\"read_bytes_per_second\": -"}, std::pair{"\"io_uring\"", "7"},
        std::pair{"\"depth\": ", "\"depth\": 0, \"was\": "}, std::pair{"\"depth\": ", "\"depth\": -1, \"was\": "},
        std::pair{"\"depth\": ", "\"depth\": 4097, \"was\": "},
        std::pair{"\"block_bytes\": ", "\"block_bytes\": 1, \"was\": "}, std::pair{"\"version\": 2,", ""}}) {
    EXPECT_TRUE(is_empty(after(from, to))) << from;
    EXPECT_THAT(logged_, HasSubstr("rates.json are ignored: it is broken")) << from;
  }
  std::ofstream(file_.path()) << "[1]";
  EXPECT_TRUE(is_empty(load()));
  EXPECT_THAT(logged_, HasSubstr("it is broken"));
  std::ofstream(file_.path()) << std::string(2 << 20, ' ');
  EXPECT_TRUE(is_empty(load()));
  EXPECT_THAT(logged_, HasSubstr("it is too long"));
}

TEST_F(RatesTest, are_not_waited_for_where_a_pipe_is_in_their_place) {
  fs::create_directory(file_.path().parent_path());
  ASSERT_EQ(::mkfifo(file_.path().c_str(), 0600), 0);
  EXPECT_TRUE(is_empty(load()));
  EXPECT_THAT(logged_, HasSubstr("it is broken"));
}

TEST_F(RatesTest, that_cannot_be_written_are_a_warning) {
  folder_.write("cache", "a file where a folder is wanted");
  testing::internal::CaptureStderr();
  file_.save(some_rates());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("warning: the rates are not kept: writing "));
}

TEST(RatesFile, is_in_the_user_s_cache_folder) {
  const EnvironmentVariable home("HOME", "/home/user");
  {
    const EnvironmentVariable cache("XDG_CACHE_HOME", "/cache");
    EXPECT_EQ(RatesFile().path(), "/cache/terrace/rates.json");
  }
  const EnvironmentVariable relative("XDG_CACHE_HOME", "cache");
  EXPECT_EQ(RatesFile().path(), "/home/user/.cache/terrace/rates.json");
}

TEST(RatesFile, is_nowhere_where_the_user_has_no_folder_and_says_so_when_something_is_to_be_kept) {
  const EnvironmentVariable home("HOME", nullptr);
  const EnvironmentVariable cache("XDG_CACHE_HOME", nullptr);
  set_log_level(LogLevel::warning);
  const RatesFile file;
  EXPECT_TRUE(file.path().empty());
  EXPECT_FALSE(file.load().memory);
  testing::internal::CaptureStderr();
  file.save(some_rates());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("neither XDG_CACHE_HOME nor HOME"));
}

TEST(PathKey, is_the_same_however_a_folder_is_written) {
  const TemporaryFolder folder;
  const std::string key = path_key(folder.path());
  EXPECT_EQ(path_key(folder.path() / ""), key);
  EXPECT_EQ(path_key(folder.path() / "other" / ".."), key);
  fs::create_directory_symlink(folder.path(), folder.path() / "link");
  EXPECT_EQ(path_key(folder.path() / "link"), key);
}

}  // namespace
}  // namespace terrace
