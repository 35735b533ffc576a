// Whose folder a checkpoint is saved to: nothing of anybody else's is lost or replaced, and two never save to one.

#include <fcntl.h>
#include <functional>
#include <set>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/noted.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_checkpoint.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using Names = std::set<std::string>;

using CheckpointFolder = CheckpointTest;

TEST_F(CheckpointFolder, a_folder_that_holds_anything_else_is_refused_and_left_alone) {
  for (const std::string name : {"notes.txt", "data.0123", "data.0123456789abcdeg", "manifest.json.bak"}) {
    const auto folder = new_folder();
    std::filesystem::create_directories(folder);
    write_text(folder / name, "precious");
    EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("'" + name + "'"));
    EXPECT_EQ(names_in(folder), Names{name});
  }
}

TEST_F(CheckpointFolder, the_manifest_of_another_program_is_refused) {
  const auto folder = new_folder();
  std::filesystem::create_directories(folder);
  write_text(folder / "manifest.json", "{\"name\": \"an extension\", \"version\": 3}");
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("choose another folder"));
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("not the manifest of a checkpoint"));
  EXPECT_EQ(names_in(folder), Names{"manifest.json"});
}

TEST_F(CheckpointFolder, a_folder_without_a_checkpoint_is_named) {
  const auto folder = new_folder();
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("there is none in " + folder.string()));
  std::filesystem::create_directories(folder);
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("there is none in " + folder.string()));
}

TEST_F(CheckpointFolder, a_file_in_the_place_of_the_folder_is_told) {
  const auto file = scratch_.write("file", "");
  EXPECT_THAT(message_of<IoError>([&] { save(*system_, file, 1); }), HasSubstr(file.string()));
  EXPECT_THAT(message_of<IoError>([&] { load(file); }), HasSubstr(file.string()));
}

TEST_F(CheckpointFolder, two_cannot_save_to_one_folder_at_a_time) {
  const auto folder = new_folder();
  const CheckpointWriter first(*system_, folder);
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("another process is saving"));
}

TEST_F(CheckpointFolder, whether_a_folder_can_be_saved_to_is_known_before_the_work) {
  const auto folder = new_folder();
  CheckpointLock lock(*system_, folder);
  require_can_save(lock);
  EXPECT_EQ(names_in(folder), Names{"lock"});
  scratch_.write("foreign/file", "");
  EXPECT_THROW(CheckpointLock(*system_, scratch_.path() / "foreign"), ConfigError);
}

TEST_F(CheckpointFolder, who_holds_the_lock_saves_again_and_again_and_nobody_else) {
  const auto folder = new_folder();
  CheckpointLock lock(*system_, folder);
  for (int i = 0; i < 2; ++i) {
    CheckpointWriter writer(lock);
    writer.commit({{"save", std::to_string(i)}});
    EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("another process is saving"));
  }
  EXPECT_EQ(CheckpointReader(*system_, folder).manifest().notes.at("save"), "1");
}

TEST_F(CheckpointFolder, what_comes_into_a_checkpoints_folder_or_a_locked_one_stays_and_ends_no_run) {
  const auto folder = new_folder();
  {
    CheckpointLock lock(*system_, folder);
    write_text(folder / ".DS_Store", "not ours");
    CheckpointWriter(lock).commit({});
  }
  write_text(folder / "notes.txt", "precious");
  save(*system_, folder, 1);
  EXPECT_EQ(load(folder), 1);
  EXPECT_EQ(text_of(folder / "notes.txt"), "precious");
  EXPECT_EQ(text_of(folder / ".DS_Store"), "not ours");
}

TEST_F(CheckpointFolder, a_locked_folder_that_is_removed_is_made_again) {
  const auto folder = new_folder();
  CheckpointLock lock(*system_, folder);
  const auto moved = new_folder();
  const std::vector<std::function<void()>> ways{[&] { std::filesystem::remove_all(folder); },
                                                [&] { std::filesystem::rename(folder, moved); }};
  for (const auto& take_away : ways) {
    take_away();
    for (const std::string value : {"1", "2"}) {
      CheckpointWriter(lock).commit({{"value", value}});
      EXPECT_EQ(CheckpointReader(*system_, folder).manifest().notes.at("value"), value);
      EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("another process is saving"));
    }
  }
  EXPECT_EQ(CheckpointReader(*system_, moved).manifest().notes.at("value"), "2");
  save(*system_, moved, 3);  // nobody has it locked any more
}

TEST_F(CheckpointFolder, a_folder_in_the_place_of_a_locked_one_is_left_alone) {
  const auto folder = new_folder();
  const auto refused = [&](CheckpointLock& lock, const std::string& reason) {
    EXPECT_THAT(message_of<IoError>([&] { CheckpointWriter writer(lock); }),
                ::testing::AllOf(HasSubstr(folder.string() + " is not the folder any more"), HasSubstr(reason)));
  };
  {
    CheckpointLock lock(*system_, folder);
    std::filesystem::remove_all(folder);
    scratch_.write(folder.filename() / "notes.txt", "precious");
    refused(lock, "holds 'notes.txt'");
    EXPECT_EQ(names_in(folder), Names{"notes.txt"});
    std::filesystem::remove_all(folder);
    save(*system_, folder, 7);
    refused(lock, "it holds a checkpoint");
    EXPECT_EQ(load(folder), 7);
    std::filesystem::remove_all(folder);
    const CheckpointLock other(*system_, folder);
    refused(lock, "another process is saving to it");
  }
}

TEST_F(CheckpointFolder, a_folder_that_is_replaced_while_it_is_saved_to_gets_no_manifest) {
  const auto folder = new_folder();
  const auto moved = new_folder();
  CheckpointLock lock(*system_, folder);
  CheckpointWriter writer(lock);
  std::filesystem::rename(folder, moved);
  std::filesystem::create_directories(folder);
  EXPECT_THAT(message_of<IoError>([&] { writer.commit({}); }),
              HasSubstr(folder.string() + " is not the folder any more"));
  EXPECT_EQ(names_in(folder), Names{});
}

TEST_F(CheckpointFolder, an_empty_name_is_no_folder) {
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, "", 1); }), HasSubstr("is empty"));
  EXPECT_THAT(message_of<ConfigError>([&] { load(""); }), HasSubstr("is empty"));
}

TEST_F(CheckpointFolder, a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for) {
  const auto folder = new_folder();
  std::filesystem::create_directories(folder);
  ASSERT_EQ(::mkfifo((folder / "manifest.json").c_str(), 0666), 0);
  EXPECT_THAT(message_of<IoError>([&] { load(folder); }), HasSubstr("manifest.json is no regular file"));
  EXPECT_THAT(message_of<IoError>([&] { save(*system_, folder, 1); }), HasSubstr("manifest.json is no regular file"));
}

TEST_F(CheckpointFolder, a_file_system_that_syncs_no_folders_can_be_saved_to) {
  const std::filesystem::path folder = "/proc/self";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) GTEST_SKIP() << "there is no " << folder;
  const bool syncs = ::fsync(descriptor) == 0;
  ::close(descriptor);
  if (syncs) GTEST_SKIP() << folder << " can be synced here";
  system_->sync_folder(folder);
  EXPECT_THAT(noted("what is saved in /proc/self may be lost"),
              HasSubstr("syncs no folders: Invalid argument (EINVAL)"));
}

}  // namespace
}  // namespace terrace::testing
