#include "offload/io_engine.h"

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/errno_text.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

/// A file in a folder of its own, both removed at the end; or an existing one such as a device.
class OpenFile {
 public:
  OpenFile() : folder_((fs::temp_directory_path() / "terrace-test-XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(folder_.data()), nullptr);
    open(fs::path(folder_) / "file", O_RDWR | O_CREAT);
  }
  OpenFile(const fs::path& existing, int flags) { open(existing, flags); }
  ~OpenFile() {
    ::close(io_file_.descriptor);
    if (!folder_.empty()) fs::remove_all(folder_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  const IoFile& get() const { return io_file_; }

 private:
  void open(const fs::path& path, int flags) {
    io_file_ = {::open(path.c_str(), flags | O_CLOEXEC, 0600), path};
    EXPECT_GE(io_file_.descriptor, 0) << path;
  }

  std::string folder_;
  IoFile io_file_;
};

/// No file may grow beyond this while it lives, and exceeding it is an error instead of a signal.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    previous_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    rlimit limit = previous_;
    limit.rlim_cur = bytes;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    std::signal(SIGXFSZ, previous_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit previous_{};
  void (*previous_handler_)(int) = nullptr;
};

std::vector<std::byte> pattern(std::size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 31 + i / 256 + seed) & 0xff);
  return bytes;
}

template <typename Action>
std::string io_error_of(Action action) {
  try {
    action();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no IoError";
}

TEST(PosixEngine, reads_back_what_was_written_at_any_offset) {
  OpenFile file;
  PosixEngine engine;
  const std::vector<std::byte> first = pattern(10000, 1), second = pattern(777, 2);
  engine.write(file.get(), 4096, first);
  engine.write(file.get(), 50001, second);
  std::vector<std::byte> read_first(first.size()), read_second(second.size());
  engine.read(file.get(), 4096, read_first);
  engine.read(file.get(), 50001, read_second);
  EXPECT_EQ(read_first, first);
  EXPECT_EQ(read_second, second);
}

TEST(PosixEngine, reads_and_writes_one_file_from_many_threads) {
  OpenFile file;
  PosixEngine engine;
  constexpr std::size_t kBytes = 5000;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<std::byte> written = pattern(kBytes, t);
      std::vector<std::byte> read(kBytes);
      for (int round = 0; round < 50; ++round) {
        engine.write(file.get(), t * kBytes, written);
        engine.read(file.get(), t * kBytes, read);
        EXPECT_EQ(read, written);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(PosixEngine, an_empty_transfer_touches_nothing) {
  PosixEngine engine;
  const IoFile closed{-1, "closed"};
  EXPECT_NO_THROW(engine.read(closed, 0, {}));
  EXPECT_NO_THROW(engine.write(closed, 0, {}));
}

TEST(PosixEngine, resumes_short_reads) {
  // The kernel serves this table at most a few pages a call, whatever is asked for.
  OpenFile table("/proc/kallsyms", O_RDONLY);
  std::vector<std::byte> whole(256 * 1024), expected(whole.size());
  std::size_t filled = 0;
  int calls = 0;
  while (filled < expected.size()) {
    const ssize_t moved =
        ::pread(table.get().descriptor, expected.data() + filled, expected.size() - filled, static_cast<off_t>(filled));
    if (moved <= 0) break;
    filled += static_cast<std::size_t>(moved);
    ++calls;
  }
  if (filled < expected.size() || calls < 2) GTEST_SKIP() << "this kernel has no table that reads short";
  PosixEngine().read(table.get(), 0, whole);
  EXPECT_EQ(whole, expected);
}

TEST(PosixEngine, resumes_a_short_write_and_reports_why_it_could_not_end) {
  OpenFile file;
  const std::vector<std::byte> bytes = pattern(8192, 3);
  std::string message;
  {
    const FileSizeLimit limit(6000);  // the first call takes 6000 bytes, the second none
    message = io_error_of([&] { PosixEngine().write(file.get(), 0, bytes); });
  }
  EXPECT_EQ(message, "nvme: write of 8192 B at offset 0 to " + file.get().path.string() +
                         " failed: File too large (EFBIG)\n  hint: raise the limit on file sizes (ulimit -f) or lower "
                         "nvme.memory");
  EXPECT_EQ(fs::file_size(file.get().path), 6000U);
}

TEST(PosixEngine, names_path_offset_length_cause_and_way_out_when_the_disk_is_full) {
  OpenFile full("/dev/full", O_RDWR);
  const std::vector<std::byte> bytes = pattern(512, 4);
  EXPECT_EQ(io_error_of([&] { PosixEngine().write(full.get(), 1024, bytes); }),
            "nvme: write of 512 B at offset 1024 to /dev/full failed: No space left on device (ENOSPC)\n"
            "  hint: free space or lower nvme.memory");
}

TEST(PosixEngine, reports_the_end_of_a_file_that_is_too_short) {
  OpenFile file;
  PosixEngine engine;
  engine.write(file.get(), 0, pattern(5000, 5));
  ASSERT_EQ(::truncate(file.get().path.c_str(), 3000), 0);
  std::vector<std::byte> bytes(5000);
  const std::string message = io_error_of([&] { engine.read(file.get(), 0, bytes); });
  EXPECT_NE(message.find("read of 5000 B at offset 0 from " + file.get().path.string()), std::string::npos) << message;
  EXPECT_NE(message.find("end of file after 3000 B"), std::string::npos) << message;
}

TEST(PosixEngine, reports_an_io_error_that_comes_after_a_short_read) {
  // Of two mapped pages the second lies beyond the end of its file: the kernel reads the first, then fails with EIO.
  constexpr std::size_t kPage = 4096;
  OpenFile file;
  PosixEngine().write(file.get(), 0, pattern(kPage, 6));
  void* pages = ::mmap(nullptr, 2 * kPage, PROT_READ, MAP_PRIVATE, file.get().descriptor, 0);
  ASSERT_NE(pages, MAP_FAILED);
  OpenFile memory("/proc/self/mem", O_RDONLY);
  std::vector<std::byte> bytes(2 * kPage);
  const std::string message =
      io_error_of([&] { PosixEngine().read(memory.get(), reinterpret_cast<std::uintptr_t>(pages), bytes); });
  ::munmap(pages, 2 * kPage);
  EXPECT_NE(message.find("/proc/self/mem failed: Input/output error (EIO)\n  hint: the drive may be failing"),
            std::string::npos)
      << message;
}

TEST(PosixEngine, reports_a_descriptor_that_is_not_open) {
  std::vector<std::byte> bytes(8);
  const IoFile closed{-1, "/data/gone"};
  EXPECT_EQ(io_error_of([&] { PosixEngine().read(closed, 16, bytes); }),
            "nvme: read of 8 B at offset 16 from /data/gone failed: Bad file descriptor (EBADF)");
}

TEST(PosixEngine, sets_space_aside_and_grows_the_file_for_it) {
  OpenFile file;
  ASSERT_TRUE(PosixEngine().allocate(file.get(), 4096, 8192));
  EXPECT_EQ(fs::file_size(file.get().path), 12288U);
}

TEST(PosixEngine, tells_at_reservation_that_space_is_short) {
  OpenFile file;
  const FileSizeLimit limit(4096);
  const std::string message = io_error_of([&] { PosixEngine().allocate(file.get(), 0, 8192); });
  EXPECT_NE(message.find("reservation of 8192 B at offset 0 in "), std::string::npos) << message;
  EXPECT_NE(message.find("(EFBIG)"), std::string::npos) << message;
}

TEST(PosixEngine, says_when_a_file_cannot_set_space_aside) {
  OpenFile file("/dev/full", O_RDWR);
  std::string message = "none";
  bool reserved = true;
  try {
    reserved = PosixEngine().allocate(file.get(), 0, 4096);
  } catch (const IoError& error) {
    message = error.what();
  }
  // A device has no notion of it; some kernels answer "not supported", others "no such device".
  EXPECT_TRUE(!reserved || message.find("(ENODEV)") != std::string::npos) << message;
}

TEST(ErrnoText, has_words_and_symbol) {
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device (ENOSPC)");
  EXPECT_EQ(errno_text(123456), "unknown error (123456)");
}

}  // namespace
}  // namespace terrace
