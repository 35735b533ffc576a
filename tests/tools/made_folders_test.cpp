#include "tools/made_folders.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

TEST(MadeFolders, removes_what_was_not_there_and_keeps_what_was) {
  const TemporaryFolder scratch;
  const fs::path there = scratch.path() / "there";
  fs::create_directory(there);
  {
    const MadeFolders made({there, there / "a" / "b" / "", there / "a" / "c"});
    fs::create_directories(there / "a" / "b");
    fs::create_directories(there / "a" / "c");
  }
  EXPECT_TRUE(fs::is_directory(there));
  EXPECT_FALSE(fs::exists(there / "a"));
}

TEST(MadeFolders, keeps_what_others_have_put_there) {
  const TemporaryFolder scratch;
  {
    const MadeFolders made({scratch.path() / "full", scratch.path() / "file", scratch.path() / "never"});
    scratch.write("full/other", "text");
    scratch.write("file", "text");
  }
  EXPECT_TRUE(fs::exists(scratch.path() / "full" / "other"));
  EXPECT_TRUE(fs::exists(scratch.path() / "file"));
}

}  // namespace
}  // namespace terrace
