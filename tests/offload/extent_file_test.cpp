#include "offload/extent_file.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <memory>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/file_io.h"
#include "tests/base/noted.h"
#include "tests/offload/open_file.h"
#include "tests/offload/refused_call.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kExtent = 4096;

class ExtentFileTest : public testing::Test {
 protected:
  ExtentFileTest() : name_((fs::temp_directory_path() / "terrace-test-XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(name_.data()), nullptr);
    folder_ = name_;
  }
  ~ExtentFileTest() override { fs::remove_all(folder_); }

  std::string name_;
  fs::path folder_;
};

/// A forked child that has made an extent file and then waits to be told to end, without destructors.
class Child {
 public:
  explicit Child(const fs::path& folder) {
    int ready[2], finish[2];
    EXPECT_EQ(::pipe(ready), 0);
    EXPECT_EQ(::pipe(finish), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(finish[1]);
      ExtentFile file(folder, kExtent, 4);
      char byte = 'r';
      if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
      if (::read(finish[0], &byte, 1) < 0) ::_exit(1);
      ::_exit(0);
    }
    ::close(ready[1]);
    ::close(finish[0]);
    finish_ = finish[1];
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1) << "the child could not make its file";
    ::close(ready[0]);
  }
  ~Child() { end(0); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  /// By a signal, or by a plain exit if that is 0.
  void end(int signal) {
    if (pid_ < 0) return;
    if (signal != 0) ::kill(pid_, signal);
    ::close(finish_);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int finish_ = -1;
};

/// Whether the file system transfers directly only in larger units than ours.
bool units_above_4096([[maybe_unused]] int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status {};
  return ::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && status.stx_dio_offset_align > 4096;
#else
  return false;
#endif
}

std::size_t count_files(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST_F(ExtentFileTest, begins_with_a_header_that_says_what_it_is) {
  const ExtentFile file(folder_, kExtent, 4);
  EXPECT_EQ(file.file().path.filename().string().rfind("terrace-" + std::to_string(::getpid()) + "-", 0), 0U);
  alignas(4096) ExtentFileHeader header;
  read_file_at(file.file(), 0, std::as_writable_bytes(std::span(&header, 1)));
  EXPECT_EQ(std::memcmp(header.magic, "TERRACE\0", 8), 0);
  EXPECT_EQ(header.version, 2U);
  EXPECT_EQ(header.header_bytes, 4096U);
  EXPECT_EQ(header.extent_bytes, kExtent);
  EXPECT_EQ(header.extent_count, 4U);
  EXPECT_EQ(header.process, ::getpid());
  EXPECT_GT(header.created_unix_seconds, 1600000000);
  EXPECT_EQ(file.offset_of(0), 4096U);
  EXPECT_EQ(file.offset_of(3), 4096U + 3 * kExtent);
  EXPECT_EQ(file.capacity_bytes(), 4096U + 4 * kExtent + 4096U);
  EXPECT_EQ(fs::file_size(file.file().path), file.capacity_bytes());
}

TEST_F(ExtentFileTest, is_removed_by_its_destructor) {
  { const ExtentFile file(folder_, kExtent, 4); }
  EXPECT_EQ(count_files(folder_), 0U);
}

TEST_F(ExtentFileTest, is_removed_wherever_the_process_works_by_then) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  fs::create_directory("below");
  {
    const ExtentFile file("below", kExtent, 4);
    EXPECT_EQ(file.file().path.parent_path(), folder_ / "below");
    fs::current_path(before);
  }
  EXPECT_EQ(count_files(folder_ / "below"), 0U);
}

TEST_F(ExtentFileTest, one_that_was_moved_is_left_and_told_of) {
  fs::create_directory(folder_ / "before");
  std::string path, logged;
  {
    const ExtentFile file(folder_ / "before", kExtent, 4);
    path = file.file().path.string();
    fs::rename(folder_ / "before", folder_ / "after");
    testing::internal::CaptureStderr();
  }
  logged = testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("nvme: " + path + " cannot be removed: it was moved"), std::string::npos) << logged;
  EXPECT_EQ(count_files(folder_ / "after"), 1U);
  {
    const ExtentFile file(folder_, kExtent, 4);
    fs::remove(file.file().path);
    testing::internal::CaptureStderr();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "nothing is left of what was deleted";
}

TEST_F(ExtentFileTest, does_not_remove_a_file_that_took_its_name) {
  fs::path path;
  {
    const ExtentFile file(folder_, kExtent, 4);
    path = file.file().path;
    fs::remove(path);
    std::ofstream(path) << "mine";
  }
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(ExtentFileTest, is_not_removed_by_a_forked_copy) {
  const auto file = std::make_unique<ExtentFile>(folder_, kExtent, 4);
  const pid_t child = ::fork();
  if (child == 0) {
    file->~ExtentFile();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(fs::exists(file->file().path));
  EXPECT_TRUE(remove_dead_extent_files(folder_).empty()) << "the lock went with the child";
}

TEST_F(ExtentFileTest, is_removed_if_it_cannot_have_its_size) {
  for (const rlim_t bytes : {rlim_t{0}, rlim_t{4096 + 4 * kExtent}}) {
    const FileSizeLimit limit(bytes);
    EXPECT_THROW(ExtentFile(folder_, kExtent, 4), IoError);
    EXPECT_EQ(count_files(folder_), 0U);
  }
}

TEST_F(ExtentFileTest, is_removed_if_its_header_cannot_be_written) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_pwrite64, ENOSPC, [&] {
    try {
      const ExtentFile file(folder_, kExtent, 4);
      return false;
    } catch (const IoError&) {
      return count_files(folder_) == 0;
    }
  }));
}

TEST_F(ExtentFileTest, goes_past_the_page_cache_where_the_file_system_can) {
  const fs::path probe = folder_ / "probe";
  const int descriptor = ::open(probe.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  ::close(descriptor);
  fs::remove(probe);
  const ExtentFile file(folder_, kExtent, 4);
  EXPECT_EQ((::fcntl(file.file().descriptor, F_GETFL) & O_DIRECT) != 0, file.direct());
  if (descriptor < 0) {
    EXPECT_FALSE(file.direct());
  } else {
    EXPECT_TRUE(file.direct() || units_above_4096(file.file().descriptor));
  }
}

TEST_F(ExtentFileTest, uses_the_page_cache_where_the_file_system_takes_nothing_else) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_fcntl, EINVAL, [&] {
    const ExtentFile file(folder_, kExtent, 4);
    const char byte = 'x';
    const std::string fallback = noted("transfers in " + folder_.string() + " go through the page cache");
    return !file.direct() && ::pwrite(file.file().descriptor, &byte, 1, 4097) == 1 &&
           fallback.find("refuses direct transfers (O_DIRECT): Invalid argument (EINVAL)") != std::string::npos;
  }));
}

TEST_F(ExtentFileTest, takes_space_on_the_disk_as_it_is_reserved) {
  constexpr std::size_t large = std::size_t{1} << 20U;
  ExtentFile file(folder_, large, 4);
  const auto on_disk = [&] {
    struct stat status {};
    EXPECT_EQ(::stat(file.file().path.c_str(), &status), 0);
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
  };
  const std::uint64_t size = fs::file_size(file.file().path);
  EXPECT_LT(on_disk(), large);
  file.reserve_space(1, 2);
  EXPECT_GE(on_disk(), 2 * large);
  EXPECT_LT(on_disk(), 3 * large);
  EXPECT_EQ(fs::file_size(file.file().path), size);
  EXPECT_TRUE(file.space_is_guaranteed());
}

TEST_F(ExtentFileTest, works_and_says_so_where_space_cannot_be_set_aside) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_fallocate, EOPNOTSUPP, [&] {
    ExtentFile file(folder_, kExtent, 4);
    file.reserve_space(0, 1);
    const std::string fallback = noted("a full disk shows only when " + folder_.string() + " is written");
    return !file.space_is_guaranteed() && fs::file_size(file.file().path) == file.capacity_bytes() &&
           fallback.find("cannot set space aside") != std::string::npos;
  }));
}

TEST_F(ExtentFileTest, a_dead_process_leaves_a_file_that_is_counted_and_removed) {
  for (const int signal : {0, SIGKILL}) {
    Child child(folder_);
    child.end(signal);
    ASSERT_EQ(count_files(folder_), 1U);
    EXPECT_GE(dead_extent_file_bytes(folder_), 4096U);
    EXPECT_EQ(remove_dead_extent_files(folder_).size(), 1U);
    EXPECT_EQ(count_files(folder_), 0U);
  }
}

TEST_F(ExtentFileTest, files_of_dead_processes_that_others_have_open_are_waited_for_together) {
  for (int i = 0; i < 3; ++i) Child(folder_).end(SIGKILL);
  std::vector<int> others;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    others.push_back(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::flock(others.back(), LOCK_SH), 0);
  }
  Patience patience{.looks_left = 4};
  EXPECT_TRUE(remove_dead_extent_files(folder_, patience).empty());
  EXPECT_EQ(patience.looks_left, 0);
  EXPECT_EQ(dead_extent_file_bytes(folder_, patience), 0U);
  for (const int other : others) ::close(other);
  EXPECT_EQ(remove_dead_extent_files(folder_, patience).size(), 3U) << "no longer in use, they need no waiting";
}

TEST_F(ExtentFileTest, the_file_of_a_live_process_is_left_alone) {
  Child child(folder_);
  EXPECT_TRUE(remove_dead_extent_files(folder_).empty());
  EXPECT_EQ(dead_extent_file_bytes(folder_), 0U);
  EXPECT_EQ(count_files(folder_), 1U);
}

TEST_F(ExtentFileTest, files_that_are_not_ours_are_left_alone) {
  // Our name with other content, no content, another version of our header; our header under another name; a folder,
  // a pipe and a link of our name.
  ExtentFileHeader header{};
  std::memcpy(header.magic, ExtentFileHeader::kMagic, sizeof header.magic);
  header.version = ExtentFileHeader::kVersion;
  header.extent_bytes = kExtent;
  const auto write_header = [&](const fs::path& path) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&header), sizeof header);
  };
  write_header(folder_ / "other.extents");
  fs::create_symlink(folder_ / "other.extents", folder_ / "terrace-1-0.extents");
  std::ofstream(folder_ / "terrace-1-1.extents") << std::string(8192, 'x');
  std::ofstream(folder_ / "terrace-1-2.extents") << "";
  ++header.version;
  write_header(folder_ / "terrace-1-3.extents");
  fs::create_directory(folder_ / "terrace-1-4.extents");
  ASSERT_EQ(::mkfifo((folder_ / "terrace-1-5.extents").c_str(), 0600), 0);

  EXPECT_TRUE(remove_dead_extent_files(folder_).empty());
  EXPECT_EQ(dead_extent_file_bytes(folder_), 0U);
  EXPECT_EQ(count_files(folder_), 7U);
  // With our version it is one of ours.
  --header.version;
  write_header(folder_ / "terrace-1-3.extents");
  EXPECT_EQ(remove_dead_extent_files(folder_), (std::vector<fs::path>{folder_ / "terrace-1-3.extents"}));
}

TEST_F(ExtentFileTest, a_name_that_is_taken_is_passed_over) {
  // As after a restart that repeats process numbers: the next names of this process exist already.
  std::string taken;
  { taken = ExtentFile(folder_, kExtent, 4).file().path.stem().string(); }
  const std::size_t dash = taken.rfind('-');
  const int number = std::stoi(taken.substr(dash + 1));
  for (int next = number + 1; next <= number + 3; ++next) {
    std::ofstream(folder_ / (taken.substr(0, dash + 1) + std::to_string(next) + ".extents")) << "theirs";
  }
  const ExtentFile file(folder_, kExtent, 4);
  EXPECT_EQ(file.file().path.filename().string(), taken.substr(0, dash + 1) + std::to_string(number + 4) + ".extents");
}

TEST_F(ExtentFileTest, processes_that_start_at_once_never_remove_each_others_file) {
  constexpr int kProcesses = 4, kRounds = 100;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (int round = 0; round < kRounds; ++round) {
        try {
          if (!remove_dead_extent_files(folder_).empty()) ::_exit(2);
          const ExtentFile file(folder_, kExtent, 4);
          struct stat status {};
          if (::fstat(file.file().descriptor, &status) != 0 || status.st_nlink != 1) ::_exit(3);
        } catch (const Error& error) {
          std::fprintf(stderr, "%s\n", error.what());
          ::_exit(4);
        }
      }
      ::_exit(0);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "ended with " << WEXITSTATUS(status);
  }
  EXPECT_EQ(count_files(folder_), 0U);
}

TEST_F(ExtentFileTest, a_folder_that_cannot_be_listed_is_an_error) {
  EXPECT_THROW(remove_dead_extent_files(folder_ / "missing"), IoError);
  EXPECT_EQ(dead_extent_file_bytes(folder_ / "missing"), 0U);
}

}  // namespace
}  // namespace terrace
