// A checkpoint's folder holds the checkpoint before or the new one, whatever happens to the process or to its files.

#include <cstdint>
#include <fcntl.h>
#include <functional>
#include <set>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_checkpoint.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

/// Runs `save` in a process of its own, killed at an operation; returns whether it came that far.
bool killed_at(std::uint64_t operation, const std::filesystem::path& folder, int value) {
  const pid_t child = ::fork();
  if (child == 0) {
    FaultInjectingFiles files(FileFault::kill, operation);
    save(files, folder, value);
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

using CheckpointFilesTest = CheckpointTest;

TEST_F(CheckpointFilesTest, gives_back_what_was_saved) {
  const auto folder = new_folder() / "in" / "another";
  save(*system_, folder, 1);
  EXPECT_EQ(load(folder), 1);
  save(*system_, folder, 2);
  EXPECT_EQ(load(folder), 2);
  expect_a_save_works(folder);
}

TEST_F(CheckpointFilesTest, a_kill_at_any_operation_leaves_the_checkpoint_before_or_the_new_one) {
  for (const bool has_one_before : {false, true}) {
    std::set<std::optional<int>> left;
    std::uint64_t operation = 0;
    for (;; ++operation) {
      SCOPED_TRACE("operation " + std::to_string(operation));
      const auto folder = new_folder();
      if (has_one_before) save(*system_, folder, 1);
      if (!killed_at(operation, folder, 2)) break;
      const std::optional<int> value = load_if_any(folder);
      left.insert(value);
      expect_a_save_works(folder);
    }
    EXPECT_GT(operation, 20U);
    EXPECT_EQ(left, (std::set<std::optional<int>>{has_one_before ? std::optional(1) : std::nullopt, 2}));
  }
}

TEST_F(CheckpointFilesTest, an_error_of_any_operation_leaves_the_checkpoint_before_or_the_new_one) {
  for (const FileFault fault : {FileFault::error, FileFault::late_error}) {
    for (const bool has_one_before : {false, true}) {
      std::uint64_t operation = 0;
      for (;; ++operation) {
        SCOPED_TRACE("operation " + std::to_string(operation));
        const auto folder = new_folder();
        if (has_one_before) save(*system_, folder, 1);
        FaultInjectingFiles files(fault, operation);
        bool has_thrown = false;
        try {
          save(files, folder, 2);
        } catch (const IoError&) {
          has_thrown = true;
        }
        if (!files.fired()) break;
        const std::optional<int> value = load_if_any(folder);
        if (has_thrown) {
          EXPECT_TRUE(value == 2 || value == (has_one_before ? std::optional(1) : std::nullopt));
        } else {
          EXPECT_EQ(value, 2) << "only clean-up may fail without a word";
        }
        if (value == 1) {
          // A file that was made and said not to have been has no owner: the next save removes it.
          EXPECT_TRUE(names_in(folder).size() == 3 || fault == FileFault::late_error);
        }
        expect_a_save_works(folder);
      }
      EXPECT_GT(operation, 20U);
    }
  }
}

TEST_F(CheckpointFilesTest, a_full_disk_is_told_with_path_offset_and_length) {
  const std::filesystem::path full = "/dev/full";
  if (!std::filesystem::exists(full)) GTEST_SKIP() << "there is no /dev/full";
  const CheckpointFile file(::open(full.c_str(), O_WRONLY | O_CLOEXEC), full);
  const std::vector<std::byte> bytes(100);
  const std::string message = message_of<IoError>([&] { system_->write(file, 4096, bytes); });
  EXPECT_THAT(message,
              HasSubstr("write of 100 B at offset 4096 to /dev/full failed: No space left on device (ENOSPC)"));
  EXPECT_THAT(message, HasSubstr("hint: free space"));
}

TEST_F(CheckpointFilesTest, what_a_killed_save_has_left_takes_no_room_from_the_next) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  write_text(folder / "data.0123456789abcdef", std::string(1000, 'x'));
  write_text(folder / "manifest.json.tmp", "{");
  {
    const CheckpointWriter writer(*system_, folder);
    EXPECT_FALSE(std::filesystem::exists(folder / "data.0123456789abcdef"));
    EXPECT_FALSE(std::filesystem::exists(folder / "manifest.json.tmp"));
  }
  EXPECT_EQ(load(folder), 1);
}

TEST_F(CheckpointFilesTest, a_save_makes_each_thing_last_before_the_next_counts_on_it) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string old_data = data_file_in(folder).filename();
  FaultInjectingFiles files;
  save(files, folder, 2);
  const std::string new_data = data_file_in(folder).filename();
  EXPECT_THAT(files.order(),
              ::testing::ElementsAre("sync folder",  // what the one before needs, before leftovers go
                                     "sync " + new_data, "sync folder", "sync manifest.json.tmp",
                                     "rename manifest.json", "sync folder", "remove " + old_data));
}

TEST_F(CheckpointFilesTest, an_error_after_the_manifest_is_in_its_place_says_that_the_checkpoint_was_saved) {
  const auto folder = new_folder();
  FaultInjectingFiles counting;
  save(counting, folder, 1);
  const auto again = new_folder();
  FaultInjectingFiles failing(FileFault::error, counting.operations() - 2);  // the last is a list of what is left
  EXPECT_THAT(message_of<IoError>([&] { save(failing, again, 1); }), HasSubstr("it was saved to " + again.string()));
  EXPECT_EQ(load(again), 1);
}

TEST_F(CheckpointFilesTest, every_error_says_the_way_out) {
  const auto hint_of = [&](const std::function<void()>& call) {
    const std::string message = message_of<IoError>(call);
    const std::size_t at = message.find("\n  hint: ");
    return at == std::string::npos ? "no hint: " + message : message.substr(at);
  };
  const auto loop = scratch_.path() / "loop";
  std::filesystem::create_symlink(loop, loop);
  EXPECT_THAT(hint_of([&] { load(loop); }), HasSubstr("another name"));
  EXPECT_THAT(hint_of([&] { save(*system_, loop, 1); }), HasSubstr("another name"));
  EXPECT_THAT(hint_of([&] { load(scratch_.path() / std::string(300, 'x')); }), HasSubstr("another name"));
  EXPECT_THAT(hint_of([&] { system_->create(new_folder() / "file"); }), HasSubstr("folder has been removed"));
  EXPECT_THAT(hint_of([&] { system_->sync_folder(new_folder()); }), HasSubstr("folder has been removed"));
  const auto none = scratch_.path() / "none";
  EXPECT_THAT(hint_of([&] { system_->rename(none, scratch_.path() / "some"); }), HasSubstr("a file has been removed"));
  const auto link = scratch_.path() / "link";
  std::filesystem::create_symlink(none / "deeper", link);
  EXPECT_THAT(hint_of([&] { save(*system_, "/proc/terrace", 1); }), HasSubstr("none can be made there"));
  EXPECT_THAT(hint_of([&] { system_->lock(link); }), HasSubstr("it is a link to what is missing"));
  const auto folder = new_folder();
  std::filesystem::create_directories(folder / "lock");
  EXPECT_THAT(hint_of([&] { save(*system_, folder, 1); }), HasSubstr("a folder in the place of a file"));
  EXPECT_THAT(hint_of([&] { system_->create(scratch_.write("there", "")); }), HasSubstr("out of the way"));
  const CheckpointFile closed(1 << 20, "closed");  // EBADF, for which there are no words of its own
  EXPECT_THAT(hint_of([&] { system_->sync(closed); }), HasSubstr("choose another folder"));
  EXPECT_THAT(hint_of([&] { system_->resize(closed, 1); }), HasSubstr("choose another folder"));
  EXPECT_THAT(hint_of([&] { system_->size(closed); }), HasSubstr("choose another folder"));
}

}  // namespace
}  // namespace terrace::testing
