#include "offload/uring_engine.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/base/noted.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/open_file.h"
#include "tests/offload/refused_call.h"
#include "tests/offload/small_disk.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

/// How many buffers are registered with the rings of this process, as the kernel tells it; -1 if it does not.
int registered_buffers() {
  int count = -1;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (fs::read_symlink(entry.path(), error) != "anon_inode:[io_uring]") continue;
    std::ifstream info("/proc/self/fdinfo/" + entry.path().filename().string());
    for (std::string line; std::getline(info, line);) {
      if (line.starts_with("UserBufs:")) count = std::max(count, 0) + std::stoi(line.substr(9));
    }
  }
  return count;
}

TEST(UringEngine, says_why_it_is_not_available) {
  EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_setup, EPERM, [] {
    std::string why_not;
    return !UringEngine::available(&why_not) && !UringEngine::available() &&
           why_not == "opening a ring failed: Operation not permitted (EPERM)";
  }));
}

TEST(UringEngine, is_not_available_where_only_smaller_rings_than_it_needs_can_be_opened) {
  if (!UringEngine::available()) GTEST_SKIP();
  if (!holds_where_locked_memory_is_limited(0, [] { return !UringEngine::available(); })) {
    GTEST_SKIP() << "this kernel does not count rings as locked memory";
  }
  constexpr std::size_t enough_for_a_small_one = 3 * 4096;
  EXPECT_TRUE(holds_where_locked_memory_is_limited(enough_for_a_small_one, [] {
    std::string why_not;
    return !UringEngine::available(&why_not) && why_not ==
                                                    "opening a ring failed: Cannot allocate memory (ENOMEM) (raise the "
                                                    "limit on locked memory, ulimit -l)";
  }));
}

TEST(UringEngine, is_not_available_where_rings_do_not_say_what_they_can_do) {
  if (!UringEngine::available()) GTEST_SKIP();
  EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_register, ENOSYS, [] {
    std::string why_not;
    return !UringEngine::available(&why_not) && why_not == "this kernel does not say what its rings can do";
  }));
}

TEST(UringEngine, registers_a_large_region_in_pieces_and_uses_them_up_to_their_borders) {
  if (!UringEngine::available()) GTEST_SKIP();
  // 1.25 GiB of addresses over 64 MiB of memory, which repeats.
  constexpr std::size_t kMemory = std::size_t{64} << 20, kRepeats = 20, kGiB = std::size_t{1} << 30;
  const int memory = ::memfd_create("terrace-test", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(memory, kMemory), 0);
  auto* begin = static_cast<std::byte*>(
      ::mmap(nullptr, kRepeats * kMemory, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (std::size_t i = 0; i < kRepeats; ++i) {
    ASSERT_NE(::mmap(begin + i * kMemory, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0),
              MAP_FAILED);
  }
  const std::span<std::byte> region(begin, kRepeats * kMemory);
  {
    const OpenFile file;
    UringEngine engine;
    const int others = std::max(registered_buffers(), 0);
    const auto queue = engine.open_queue(4, {&region, 1});
    if (const int buffers = registered_buffers(); buffers > others) {
      EXPECT_EQ(buffers - others, 2);
    }
    std::vector<IoCompletion> done;
    for (const std::size_t place : {std::size_t{0}, kGiB - 8192, kGiB - 4096, kGiB, region.size() - 8192}) {
      for (std::size_t i = 0; i < 8192; ++i) region[place + i] = static_cast<std::byte>(i / 7 + place / 4096);
      const std::vector<std::byte> written(begin + place, begin + place + 8192);
      for (const auto direction : {IoOperation::Direction::write, IoOperation::Direction::read}) {
        queue->submit({direction, &file.get(), place, begin + place, 8192, nullptr});
        done.clear();
        queue->wait(done);
        ASSERT_EQ(done.size(), 1U);
        EXPECT_FALSE(done[0].error);
        if (direction == IoOperation::Direction::write) std::fill_n(begin + place, 8192, std::byte{0});
      }
      EXPECT_TRUE(std::equal(written.begin(), written.end(), begin + place)) << "at " << place;
    }
  }
  ::munmap(begin, region.size());
  ::close(memory);
}

TEST(UringEngine, registers_memory_in_place_of_what_was_registered_before) {
  if (!UringEngine::available()) GTEST_SKIP();
  alignas(4096) static std::byte bytes[4 * 4096];
  const auto page = [](std::size_t number) { return std::span(bytes).subspan(number * 4096, 4096); };
  const std::vector<std::span<std::byte>> one = {page(0)}, three = {page(1), page(2), page(3)};
  const int others = std::max(registered_buffers(), 0);
  const auto queue = UringEngine().open_queue(1, one);
  if (registered_buffers() < 0) GTEST_SKIP() << "this kernel does not tell what is registered";
  EXPECT_EQ(registered_buffers() - others, 1);
  queue->register_memory(three);
  EXPECT_EQ(registered_buffers() - others, 3);
  queue->register_memory({});
  EXPECT_EQ(registered_buffers() - others, 0);
  queue->register_memory(one);
  EXPECT_EQ(registered_buffers() - others, 1);
}

TEST(UringEngine, holds_no_file_once_its_queue_has_ended) {
  if (!UringEngine::available()) GTEST_SKIP();
  constexpr std::size_t bytes = std::size_t{8} << 20U;
  const TemporaryFolder folder;
  const std::optional<bool> holds = holds_on_small_disk(folder.path(), 2 * bytes, [&] {
    alignas(4096) static std::byte memory[4096];
    const std::span<std::byte> region(memory);
    const std::uintmax_t before = fs::space(folder.path()).available;
    for (int round = 0; round < 20; ++round) {
      const IoFile file{::open((folder.path() / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600), "file"};
      const IoFile* const files[] = {&file};
      auto queue = UringEngine().open_queue(1, {&region, 1}, files);
      if (::fallocate(file.descriptor, 0, 0, bytes) != 0) return false;
      queue->submit({IoOperation::Direction::write, &file, 0, memory, sizeof memory, nullptr});
      queue.reset();
      fs::remove(folder.path() / "file");
      ::close(file.descriptor);
      if (fs::space(folder.path()).available != before) return false;  // the next one could not have it
    }
    return true;
  });
  if (!holds) GTEST_SKIP() << "no mount of our own here";
  EXPECT_TRUE(*holds);
}

TEST(UringEngine, works_unregistered_where_memory_cannot_be_locked) {
  if (!UringEngine::available()) GTEST_SKIP();
  EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_register, ENOMEM, [] {
    alignas(4096) static std::byte bytes[4096];
    const std::span<std::byte> region(bytes);
    const OpenFile file;
    bytes[17] = std::byte{42};
    const auto queue = UringEngine().open_queue(1, {&region, 1});
    std::vector<IoCompletion> done;
    queue->submit({IoOperation::Direction::write, &file.get(), 0, bytes, sizeof bytes, nullptr});
    queue->wait(done);
    bytes[17] = std::byte{0};
    queue->submit({IoOperation::Direction::read, &file.get(), 0, bytes, sizeof bytes, nullptr});
    queue->wait(done);
    const std::string fallback = noted("io_uring transfers memory that is not registered");
    return !done.at(0).error && !done.at(1).error && bytes[17] == std::byte{42} &&
           fallback.find("Cannot allocate memory (ENOMEM)") != std::string::npos;
  }));
}

TEST(UringEngine, what_the_kernel_does_not_take_completes_with_the_reason) {
  if (!UringEngine::available()) GTEST_SKIP();
  struct Case {
    int error_number;
    const char* cause;
  };
  // That of EAGAIN is a lack of memory, which may pass but need not.
  for (const Case& refusal : {Case{EPERM, "(EPERM)"}, Case{EAGAIN, "(ENOMEM)"}}) {
    EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_enter, refusal.error_number, [&] {
      std::byte byte{};
      const IoFile file{0, "/data/file"};
      const auto queue = UringEngine().open_queue(3);
      for (std::size_t round = 0; round < 20; ++round) {
        std::vector<IoCompletion> done;
        for (std::size_t i = 0; i < 3; ++i) {
          queue->submit({IoOperation::Direction::write, &file, round, &byte, 1, nullptr});
        }
        while (queue->in_flight() > 0) queue->wait(done);
        if (done.size() != 3) return false;
        for (const IoCompletion& completion : done) {
          try {
            std::rethrow_exception(completion.error);
          } catch (const IoError& error) {
            // In the end even the ring is full of what was not taken.
            if (error.message().find(round == 0 ? refusal.cause : "/data/file failed") == std::string::npos) throw;
          }
        }
      }
      return true;
    }));
  }
}

TEST(UringEngine, a_wait_fails_where_the_kernel_does_not_let_it) {
  if (!UringEngine::available()) GTEST_SKIP();
  EXPECT_TRUE(holds_where_call_is_refused(SYS_io_uring_enter, EPERM, [] {
    const auto queue = UringEngine().open_queue(1);
    std::vector<IoCompletion> done;
    try {
      queue->wait(done);
    } catch (const IoError&) {
      return true;
    }
    return false;
  }));
}

}  // namespace
}  // namespace terrace
