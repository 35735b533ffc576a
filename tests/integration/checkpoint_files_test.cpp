// A checkpoint's folder holds the checkpoint before or the new one, whatever happens to the process or to its files;
// and no byte of it is believed that is not what was saved.

#include <array>
#include <cstdint>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_writer.h"
#include "tests/base/noted.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/message_of.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using Names = std::set<std::string>;

/// Sizes around the pieces in which records are read, and around their alignment.
constexpr std::array<std::size_t, 4> sizes{4, 4096, 5000, 40000};

std::vector<std::byte> bytes_of(int value, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<std::size_t>(value) * 31 + i * 7);
  }
  return bytes;
}

CheckpointRecord buffer_record(const std::string& name, std::size_t size) {
  CheckpointRecord record;
  record.name = name;
  record.kind = CheckpointRecord::Kind::buffer;
  record.dtype = "uint8";
  record.shape = {static_cast<std::int64_t>(size)};
  record.strides = {1};
  return record;
}

void save(CheckpointFiles& files, const std::filesystem::path& folder, int value) {
  CheckpointWriter writer(files, folder);
  for (const std::size_t size : sizes) {
    writer.begin(buffer_record("of " + std::to_string(size), size));
    const std::vector<std::byte> bytes = bytes_of(value, size);
    writer.append(std::span(bytes).first(size / 3));
    writer.append(std::span(bytes).subspan(size / 3));
  }
  writer.commit({{"value", std::to_string(value)}});
}

/// The value that was saved; all bytes are checked.
int load(const std::filesystem::path& folder) {
  const CheckpointReader reader(checkpoint_files(), folder);
  const int value = std::stoi(reader.manifest().notes.at("value"));
  EXPECT_EQ(reader.manifest().records.size(), sizes.size());
  for (const CheckpointRecord& record : reader.manifest().records) {
    EXPECT_EQ(record.offset % checkpoint_alignment, 0U);
    reader.verify(record);
    std::vector<std::byte> bytes(record.bytes);
    reader.read(record, [&](std::uint64_t offset) { return std::span(bytes).subspan(offset).first(1 + offset % 3); });
    EXPECT_EQ(bytes, bytes_of(value, record.bytes));
  }
  return value;
}

/// Nothing where there is no checkpoint.
std::optional<int> load_if_any(const std::filesystem::path& folder) {
  try {
    return load(folder);
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("there is none"));
    return std::nullopt;
  }
}

Names names_in(const std::filesystem::path& folder) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

std::filesystem::path data_file_in(const std::filesystem::path& folder) {
  for (const std::string& name : names_in(folder)) {
    if (is_data_file_name(name)) return folder / name;
  }
  ADD_FAILURE() << "no data file in " << folder;
  return {};
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

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

class CheckpointFilesTest : public ::testing::Test {
 protected:
  std::filesystem::path new_folder() { return scratch_.path() / ("checkpoint" + std::to_string(folders_++)); }

  void expect_a_save_works(const std::filesystem::path& folder) {
    save(*system_, folder, 3);
    EXPECT_EQ(load(folder), 3);
    EXPECT_EQ(names_in(folder), (Names{"lock", "manifest.json", data_file_in(folder).filename().string()}));
  }

  TemporaryFolder scratch_;
  std::unique_ptr<CheckpointFiles> system_ = make_system_files();
  int folders_ = 0;
};

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

TEST_F(CheckpointFilesTest, a_folder_that_holds_anything_else_is_refused_and_left_alone) {
  for (const std::string name : {"notes.txt", "data.0123", "data.0123456789abcdeg", "manifest.json.bak"}) {
    const auto folder = new_folder();
    std::filesystem::create_directories(folder);
    write_text(folder / name, "precious");
    EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("'" + name + "'"));
    EXPECT_EQ(names_in(folder), Names{name});
  }
}

TEST_F(CheckpointFilesTest, the_manifest_of_another_program_is_refused) {
  const auto folder = new_folder();
  std::filesystem::create_directories(folder);
  write_text(folder / "manifest.json", "{\"name\": \"an extension\", \"version\": 3}");
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("choose another folder"));
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("not the manifest of a checkpoint"));
  EXPECT_EQ(names_in(folder), Names{"manifest.json"});
}

TEST_F(CheckpointFilesTest, a_folder_without_a_checkpoint_is_named) {
  const auto folder = new_folder();
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("there is none in " + folder.string()));
  std::filesystem::create_directories(folder);
  EXPECT_THAT(message_of<ConfigError>([&] { load(folder); }), HasSubstr("there is none in " + folder.string()));
}

TEST_F(CheckpointFilesTest, a_file_in_the_place_of_the_folder_is_told) {
  const auto file = scratch_.write("file", "");
  EXPECT_THAT(message_of<IoError>([&] { save(*system_, file, 1); }), HasSubstr(file.string()));
  EXPECT_THAT(message_of<IoError>([&] { load(file); }), HasSubstr(file.string()));
}

TEST_F(CheckpointFilesTest, two_cannot_save_to_one_folder_at_a_time) {
  const auto folder = new_folder();
  const CheckpointWriter first(*system_, folder);
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("another process is saving"));
}

TEST_F(CheckpointFilesTest, whether_a_folder_can_be_saved_to_is_known_before_the_work) {
  const auto folder = new_folder();
  CheckpointLock lock(*system_, folder);
  require_can_save(lock);
  EXPECT_EQ(names_in(folder), Names{"lock"});
  scratch_.write("foreign/file", "");
  EXPECT_THROW(CheckpointLock(*system_, scratch_.path() / "foreign"), ConfigError);
}

TEST_F(CheckpointFilesTest, who_holds_the_lock_saves_again_and_again_and_nobody_else) {
  const auto folder = new_folder();
  CheckpointLock lock(*system_, folder);
  for (int i = 0; i < 2; ++i) {
    CheckpointWriter writer(lock);
    writer.commit({{"save", std::to_string(i)}});
    EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, folder, 1); }), HasSubstr("another process is saving"));
  }
  EXPECT_EQ(CheckpointReader(*system_, folder).manifest().notes.at("save"), "1");
}

TEST_F(CheckpointFilesTest, what_comes_into_a_checkpoints_folder_or_a_locked_one_stays_and_ends_no_run) {
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

TEST_F(CheckpointFilesTest, a_locked_folder_that_is_removed_is_made_again) {
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

TEST_F(CheckpointFilesTest, a_folder_in_the_place_of_a_locked_one_is_left_alone) {
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

TEST_F(CheckpointFilesTest, a_folder_that_is_replaced_while_it_is_saved_to_gets_no_manifest) {
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

TEST_F(CheckpointFilesTest, an_empty_record_is_one_wherever_it_comes) {
  const auto folder = new_folder();
  {
    CheckpointWriter writer(*system_, folder);
    writer.begin(buffer_record("first", 0));
    writer.begin(buffer_record("of 4", 4));
    writer.append(bytes_of(1, 4));
    writer.begin(buffer_record("last", 0));
    writer.commit({});
  }
  const CheckpointReader reader(*system_, folder);
  ASSERT_EQ(reader.manifest().records.size(), 3U);
  for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
}

TEST_F(CheckpointFilesTest, a_record_without_a_place_is_refused) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const CheckpointReader reader(*system_, folder);
  const CheckpointRecord& record = reader.manifest().records.front();
  EXPECT_THAT(
      message_of<LogicError>([&] { reader.read(record, [](std::uint64_t) { return std::span<std::byte>(); }); }),
      HasSubstr("no place for the bytes from 0 of the buffer of 'of 4'"));
}

TEST_F(CheckpointFilesTest, an_empty_name_is_no_folder) {
  EXPECT_THAT(message_of<ConfigError>([&] { save(*system_, "", 1); }), HasSubstr("is empty"));
  EXPECT_THAT(message_of<ConfigError>([&] { load(""); }), HasSubstr("is empty"));
}

TEST_F(CheckpointFilesTest, a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for) {
  const auto folder = new_folder();
  std::filesystem::create_directories(folder);
  ASSERT_EQ(::mkfifo((folder / "manifest.json").c_str(), 0666), 0);
  EXPECT_THAT(message_of<IoError>([&] { load(folder); }), HasSubstr("manifest.json is no regular file"));
  EXPECT_THAT(message_of<IoError>([&] { save(*system_, folder, 1); }), HasSubstr("manifest.json is no regular file"));
}

TEST_F(CheckpointFilesTest, a_manifest_larger_than_any_is_corrupt_and_not_read) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  std::filesystem::resize_file(folder / "manifest.json", std::uintmax_t{1} << 40);
  FaultInjectingFiles files;
  EXPECT_THAT(message_of<CorruptData>([&] { CheckpointReader(files, folder); }), HasSubstr("more than any manifest"));
  EXPECT_EQ(files.reads(), 0U);
  save(*system_, folder, 2);
  EXPECT_EQ(load(folder), 2);
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

TEST_F(CheckpointFilesTest, a_file_system_that_syncs_no_folders_can_be_saved_to) {
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

TEST_F(CheckpointFilesTest, a_save_meanwhile_changes_nothing_of_what_is_read) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const CheckpointReader reader(*system_, folder);
  save(*system_, folder, 2);
  for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
  EXPECT_EQ(reader.manifest().notes.at("value"), "1");
}

TEST_F(CheckpointFilesTest, every_flipped_bit_of_a_manifest_is_found) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string text = text_of(folder / "manifest.json");
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    write_text(folder / "manifest.json", changed);
    EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("manifest.json is corrupt")) << "byte " << i;
  }
  expect_a_save_works(folder);
}

TEST_F(CheckpointFilesTest, a_manifest_cut_anywhere_is_corrupt) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string text = text_of(folder / "manifest.json");
  for (std::size_t size = 0; size < text.size(); size += 7) {
    write_text(folder / "manifest.json", text.substr(0, size));
    EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("manifest.json is corrupt")) << size;
  }
}

TEST_F(CheckpointFilesTest, a_flipped_bit_of_any_record_is_found_and_the_record_named) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string data = text_of(data_file_in(folder));
  const CheckpointManifest manifest = CheckpointReader(*system_, folder).manifest();
  for (const CheckpointRecord& record : manifest.records) {
    for (const std::uint64_t at : {record.offset, record.offset + record.bytes - 1}) {
      std::string changed = data;
      changed[at] = static_cast<char>(changed[at] ^ 1);
      write_text(data_file_in(folder), changed);
      const std::string message = message_of<CorruptData>([&] { load(folder); });
      EXPECT_THAT(message, HasSubstr(describe(record)));
      EXPECT_THAT(message, HasSubstr(data_file_in(folder).string()));
    }
  }
}

TEST_F(CheckpointFilesTest, missing_and_truncated_data_are_told_as_such) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const auto data = data_file_in(folder);
  const CheckpointReader reader(*system_, folder);
  std::filesystem::resize_file(data, std::filesystem::file_size(data) - 1);
  EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("truncated: it has"));
  EXPECT_THAT(message_of<CorruptData>([&] { reader.verify(reader.manifest().records.back()); }),
              HasSubstr("truncated: it ends within the buffer of 'of 40000'"));
  std::filesystem::remove(data);
  EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr(data.string() + " is missing"));
}

TEST_F(CheckpointFilesTest, a_read_that_fails_is_an_io_error) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  FaultInjectingFiles files(FileFault::error, 2, /*reads_only=*/true);
  const CheckpointReader reader(files, folder);
  EXPECT_THROW(
      {
        for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
      },
      IoError);
}

}  // namespace
}  // namespace terrace::testing
