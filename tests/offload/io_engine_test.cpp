/// What every engine promises, run on each of them.
#include "offload/io_engine.h"

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/choose_engine.h"
#include "offload/file_io.h"
#include "offload/uring_engine.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/open_file.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using Direction = IoOperation::Direction;

constexpr std::size_t kPage = 4096;

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "no error";
  try {
    std::rethrow_exception(error);
  } catch (const IoError& io_error) {
    return io_error.what();
  }
}

class IoEngineTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    std::string why_not;
    if (name == "io_uring" && !UringEngine::available(&why_not)) GTEST_SKIP() << why_not;
    if (name == "fault_injecting") {
      engine_ = std::make_unique<FaultInjectingEngine>(make_io_engine("auto"));
    } else {
      engine_ = make_io_engine(name);
    }
    EXPECT_EQ(engine_->name(), name);
  }

  /// Runs one operation in a queue of its own and gives its error.
  std::string run(Direction direction, const IoFile& file, std::uint64_t offset, AlignedBytes& bytes) {
    const auto queue = engine_->open_queue(1);
    queue->submit({direction, &file, offset, bytes.data(), bytes.size(), &bytes});
    std::vector<IoCompletion> done;
    queue->wait(done);
    EXPECT_EQ(done.size(), 1U);
    EXPECT_EQ(done.at(0).owner, &bytes);
    EXPECT_EQ(queue->in_flight(), 0U);
    return text_of(done.at(0).error);
  }
  std::string read(const IoFile& file, std::uint64_t offset, AlignedBytes& bytes) {
    return run(Direction::read, file, offset, bytes);
  }
  std::string write(const IoFile& file, std::uint64_t offset, AlignedBytes bytes) {
    return run(Direction::write, file, offset, bytes);
  }

  std::unique_ptr<IoEngine> engine_;
};

INSTANTIATE_TEST_SUITE_P(Engines, IoEngineTest, testing::Values("io_uring", "threads", "fault_injecting"),
                         [](const auto& engine) { return std::string(engine.param); });

/// Waits for all that is in flight; every operation must succeed, and complete once.
std::multiset<void*> drain(IoQueue& queue) {
  std::vector<IoCompletion> done;
  while (queue.in_flight() > 0) queue.wait(done);
  std::multiset<void*> owners;
  for (const IoCompletion& completion : done) {
    EXPECT_EQ(text_of(completion.error), "no error");
    owners.insert(completion.owner);
  }
  return owners;
}

// ---- Bytes

TEST_P(IoEngineTest, reads_back_what_was_written_at_any_offset) {
  const OpenFile file;
  const AlignedBytes first = random_bytes(10000, 1), second = random_bytes(777, 2);
  EXPECT_EQ(write(file.get(), 4096, first), "no error");
  EXPECT_EQ(write(file.get(), 50001, second), "no error");
  AlignedBytes read_first(first.size()), read_second(second.size());
  EXPECT_EQ(read(file.get(), 4096, read_first), "no error");
  EXPECT_EQ(read(file.get(), 50001, read_second), "no error");
  EXPECT_EQ(read_first, first);
  EXPECT_EQ(read_second, second);
}

TEST_P(IoEngineTest, keeps_many_operations_apart_in_registered_memory_and_out_of_it) {
  constexpr std::size_t kDepth = 32, kPages = 256;
  constexpr std::uint64_t kSeed = 5;
  const OpenFile file;
  AlignedBytes memory = random_bytes(kPages * kPage, kSeed);
  const AlignedBytes written = memory;
  // A quarter at either end is not registered, and operations reach across the borders.
  const std::span<std::byte> whole(memory);
  const std::vector<std::span<std::byte>> registered = {whole.subspan(128 * kPage, 64 * kPage),
                                                        whole.subspan(64 * kPage, 64 * kPage)};
  const auto queue = engine_->open_queue(kDepth, registered);
  EXPECT_EQ(queue->depth(), kDepth);
  for (const Direction direction : {Direction::write, Direction::read}) {
    std::mt19937_64 random(kSeed);  // the same operations both times
    std::set<void*> expected;
    std::multiset<void*> owners;
    std::vector<IoCompletion> done;
    const auto take_in = [&] {
      for (const IoCompletion& completion : done) {
        EXPECT_EQ(text_of(completion.error), "no error");
        owners.insert(completion.owner);
      }
      done.clear();
    };
    for (std::size_t page = 0; page < kPages;) {
      const std::size_t count = std::min<std::size_t>(1 + random() % 3, kPages - page);
      while (queue->in_flight() == kDepth) queue->wait(done);
      queue->poll(done);
      take_in();
      std::byte* place = memory.data() + page * kPage;
      queue->submit({direction, &file.get(), (kPages - page) * 4 * kPage, place, count * kPage - 1, place});
      expected.insert(place);
      page += count;
    }
    owners.merge(drain(*queue));
    EXPECT_EQ(owners, std::multiset<void*>(expected.begin(), expected.end()));
    if (direction == Direction::write) {
      // The last byte of each operation is not moved: of the pages, only that one may differ in the end.
      for (std::byte& byte : memory) byte ^= std::byte{0xff};
    }
  }
  std::size_t different = 0;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (memory[i] == written[i]) continue;
    ++different;
    EXPECT_EQ(i % kPage, kPage - 1);
  }
  EXPECT_LE(different, kPages);
}

TEST_P(IoEngineTest, moves_blocks_of_direct_files_and_meets_their_end) {
  const OpenFile file;
  if (::fcntl(file.get().descriptor, F_SETFL, O_RDWR | O_DIRECT) != 0) GTEST_SKIP() << "no direct files here";
  constexpr std::size_t kBlocks = 32, kBlock = 2 * kPage;
  AlignedBytes memory = random_bytes(kBlocks * kBlock, 3);
  const AlignedBytes written = memory;
  const std::span<std::byte> registered = std::span(memory).first(kBlocks / 2 * kBlock);
  {
    const auto queue = engine_->open_queue(kBlocks, {&registered, 1});
    for (const Direction direction : {Direction::write, Direction::read}) {
      for (std::size_t i = 0; i < kBlocks; ++i) {
        std::byte* place = memory.data() + i * kBlock;
        queue->submit({direction, &file.get(), (kBlocks - i) * kBlock, place, kBlock, place});
      }
      EXPECT_EQ(drain(*queue).size(), kBlocks);
      if (direction == Direction::write) std::fill(memory.begin(), memory.end(), std::byte{0});
    }
  }
  EXPECT_EQ(memory, written);
  // Within a block, from where such a file cannot be read on.
  ASSERT_EQ(::ftruncate(file.get().descriptor, kBlock + 100), 0);
  AlignedBytes last(kBlock);
  EXPECT_NE(read(file.get(), kBlock, last).find("end of file after 100 B"), std::string::npos);
}

TEST_P(IoEngineTest, works_with_memory_that_cannot_be_registered) {
  void* no_access = ::mmap(nullptr, 4 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(no_access, MAP_FAILED);
  const std::span<std::byte> region(static_cast<std::byte*>(no_access), 4 * kPage);
  const OpenFile file;
  AlignedBytes bytes = random_bytes(kPage, 1);
  const AlignedBytes written = bytes;
  {
    const auto queue = engine_->open_queue(2, {&region, 1});
    for (const Direction direction : {Direction::write, Direction::read}) {
      queue->submit({direction, &file.get(), 0, bytes.data(), bytes.size(), nullptr});
      EXPECT_EQ(drain(*queue).size(), 1U);
      if (direction == Direction::write) std::fill(bytes.begin(), bytes.end(), std::byte{0});
    }
  }
  EXPECT_EQ(bytes, written);
  ::munmap(no_access, 4 * kPage);
}

TEST_P(IoEngineTest, moves_memory_whether_it_is_registered_anew_no_longer_or_in_vain) {
  void* no_access = ::mmap(nullptr, 4 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(no_access, MAP_FAILED);
  const std::span<std::byte> impossible(static_cast<std::byte*>(no_access), 4 * kPage);
  const OpenFile file;
  AlignedBytes memory = random_bytes(2 * kPage, 8);
  const AlignedBytes written = memory;
  const std::span<std::byte> first = std::span(memory).first(kPage), second = std::span(memory).last(kPage);
  {
    const auto queue = engine_->open_queue(2, {&first, 1});
    for (const auto& regions : {std::vector{second}, {}, {first, second}, {impossible}, {first}}) {
      queue->register_memory(regions);
      for (const Direction direction : {Direction::write, Direction::read}) {
        for (const std::span<std::byte> page : {first, second}) {
          const auto offset = static_cast<std::uint64_t>(page.data() - memory.data());
          queue->submit({direction, &file.get(), offset, page.data(), page.size(), page.data()});
        }
        EXPECT_EQ(drain(*queue).size(), 2U);
        if (direction == Direction::write) std::fill(memory.begin(), memory.end(), std::byte{0});
      }
      EXPECT_EQ(memory, written);
    }
  }
  ::munmap(no_access, 4 * kPage);
}

TEST_P(IoEngineTest, an_empty_transfer_touches_nothing) {
  const IoFile closed{-1, "closed"};
  AlignedBytes nothing;
  EXPECT_EQ(read(closed, 0, nothing), "no error");
  EXPECT_EQ(write(closed, 0, nothing), "no error");
}

TEST_P(IoEngineTest, serves_queues_of_many_threads_at_once) {
  const OpenFile file;
  constexpr std::size_t kBytes = 5000;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto queue = engine_->open_queue(2);
      AlignedBytes written = random_bytes(kBytes, t), read(kBytes);
      for (int round = 0; round < 50; ++round) {
        queue->submit({Direction::write, &file.get(), t * kBytes, written.data(), kBytes, nullptr});
        drain(*queue);
        queue->submit({Direction::read, &file.get(), t * kBytes, read.data(), kBytes, nullptr});
        drain(*queue);
        EXPECT_EQ(read, written);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- Short transfers and errors

TEST_P(IoEngineTest, resumes_short_reads) {
  // The kernel serves this table at most a few pages a call, whatever is asked for.
  const OpenFile table("/proc/kallsyms", O_RDONLY);
  AlignedBytes whole(256 * 1024), expected(whole.size());
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
  EXPECT_EQ(read(table.get(), 0, whole), "no error");
  EXPECT_EQ(whole, expected);
}

TEST_P(IoEngineTest, resumes_a_short_write_and_reports_why_it_could_not_end) {
  const OpenFile file;
  std::string message;
  {
    const FileSizeLimit limit(6000);  // the first call takes 6000 bytes, the second none
    message = write(file.get(), 0, random_bytes(8192, 3));
  }
  EXPECT_EQ(message, "nvme: write of 8192 B at offset 0 to " + file.get().path.string() +
                         " failed: File too large (EFBIG)\n  hint: raise the limit on file sizes (ulimit -f) or lower "
                         "nvme.memory");
  EXPECT_EQ(fs::file_size(file.get().path), 6000U);
}

TEST_P(IoEngineTest, names_path_offset_length_cause_and_way_out_when_the_disk_is_full) {
  const OpenFile full("/dev/full", O_RDWR);
  EXPECT_EQ(write(full.get(), 1024, random_bytes(512, 4)),
            "nvme: write of 512 B at offset 1024 to /dev/full failed: No space left on device (ENOSPC)\n"
            "  hint: free space or lower nvme.memory");
}

TEST_P(IoEngineTest, reports_the_end_of_a_file_that_is_too_short) {
  const OpenFile file;
  EXPECT_EQ(write(file.get(), 0, random_bytes(3000, 5)), "no error");
  AlignedBytes bytes(5000);
  EXPECT_EQ(read(file.get(), 0, bytes), "nvme: read of 5000 B at offset 0 from " + file.get().path.string() +
                                            " failed: end of file after 3000 B\n  hint: the file was cut short by "
                                            "something else");
  EXPECT_NE(read(file.get(), 8192, bytes).find("end of file after 0 B"), std::string::npos);
}

TEST_P(IoEngineTest, reports_an_io_error_that_comes_after_a_short_read) {
  // Of two mapped pages the second lies beyond the end of its file: the kernel reads the first, then fails with EIO.
  const OpenFile file;
  EXPECT_EQ(write(file.get(), 0, random_bytes(kPage, 6)), "no error");
  void* pages = ::mmap(nullptr, 2 * kPage, PROT_READ, MAP_PRIVATE, file.get().descriptor, 0);
  ASSERT_NE(pages, MAP_FAILED);
  const OpenFile memory("/proc/self/mem", O_RDONLY);
  AlignedBytes bytes(2 * kPage);
  const std::string message = read(memory.get(), reinterpret_cast<std::uintptr_t>(pages), bytes);
  ::munmap(pages, 2 * kPage);
  EXPECT_NE(message.find("/proc/self/mem failed: Input/output error (EIO)\n  hint: the drive may be failing"),
            std::string::npos)
      << message;
}

TEST_P(IoEngineTest, a_failed_operation_leaves_the_others_alone) {
  const OpenFile file;
  const IoFile closed{-1, "/data/gone"};
  AlignedBytes bytes = random_bytes(16 * kPage, 7);
  const auto queue = engine_->open_queue(16);
  std::map<void*, bool> should_fail;
  for (std::size_t i = 0; i < 16; ++i) {
    std::byte* place = bytes.data() + i * kPage;
    should_fail[place] = i % 3 == 0;
    queue->submit({Direction::write, i % 3 == 0 ? &closed : &file.get(), i * kPage, place, kPage, place});
  }
  std::vector<IoCompletion> done;
  while (queue->in_flight() > 0) queue->wait(done);
  ASSERT_EQ(done.size(), 16U);
  for (const IoCompletion& completion : done) {
    const auto offset = static_cast<std::byte*>(completion.owner) - bytes.data();
    EXPECT_EQ(text_of(completion.error), should_fail.at(completion.owner)
                                             ? "nvme: write of 4096 B at offset " + std::to_string(offset) +
                                                   " to /data/gone failed: Bad file descriptor (EBADF)"
                                             : "no error");
  }
}

// ---- Depth

TEST_P(IoEngineTest, refuses_what_is_beyond_its_depth_until_completions_are_taken) {
  const OpenFile file;
  AlignedBytes bytes(kPage);
  const auto queue = engine_->open_queue(3);
  const IoOperation operation{Direction::write, &file.get(), 0, bytes.data(), bytes.size(), nullptr};
  for (int i = 0; i < 3; ++i) queue->submit(operation);
  EXPECT_THROW(queue->submit(operation), LogicError);
  EXPECT_EQ(queue->in_flight(), 3U);
  EXPECT_EQ(drain(*queue).size(), 3U) << "the refused one completed";
  EXPECT_NO_THROW(queue->submit(operation));
  EXPECT_EQ(drain(*queue).size(), 1U);
  EXPECT_THROW(engine_->open_queue(0), LogicError);
}

TEST_P(IoEngineTest, can_be_polled_to_the_end) {
  const OpenFile file;
  AlignedBytes bytes(kPage);
  const auto queue = engine_->open_queue(2);
  std::vector<IoCompletion> done;
  queue->poll(done);
  EXPECT_TRUE(done.empty());
  queue->submit({Direction::write, &file.get(), 0, bytes.data(), bytes.size(), nullptr});
  while (done.empty()) queue->poll(done);
  EXPECT_EQ(done.size(), 1U);
}

// ---- Waking

TEST_P(IoEngineTest, a_wake_is_kept_until_the_next_wait) {
  const auto queue = engine_->open_queue(2);
  std::vector<IoCompletion> done;
  queue->wake();
  queue->poll(done);
  queue->wait(done);
  queue->wake();
  queue->wake();
  queue->wait(done);
  EXPECT_TRUE(done.empty());

  // Both were one: the next wait ends for this one.
  std::atomic<bool> called{false};
  std::thread other([&] {
    called = true;
    queue->wake();
  });
  queue->wait(done);
  EXPECT_TRUE(called);
  other.join();
}

TEST_P(IoEngineTest, no_wake_is_lost_however_it_meets_waits_and_completions) {
  constexpr int kRounds = 3000;
  const OpenFile file;
  AlignedBytes bytes(kPage);
  const auto queue = engine_->open_queue(4);
  std::atomic<int> called{0}, seen{0};
  std::thread other([&] {
    for (int round = 1; round <= kRounds; ++round) {
      called = round;
      queue->wake();
      // In every other round it goes on only once it was heard.
      while (round % 2 == 0 && seen < round) std::this_thread::yield();
    }
  });
  std::size_t submitted = 0;
  std::vector<IoCompletion> done;
  while (seen < kRounds) {
    // Sometimes with an operation in flight, sometimes with nothing but the wake to wait for.
    if (queue->in_flight() < queue->depth() && submitted < static_cast<std::size_t>(seen)) {
      queue->submit({Direction::write, &file.get(), 0, bytes.data(), bytes.size(), nullptr});
      ++submitted;
    }
    queue->wait(done);
    seen = called.load();
  }
  other.join();
  while (done.size() < submitted) queue->wait(done);
  EXPECT_EQ(done.size(), submitted);
}

// ---- Ending

TEST_P(IoEngineTest, a_queue_that_ends_carries_out_what_was_submitted_first) {
  constexpr std::size_t kOperations = 32, kBytes = 256 * 1024;
  const OpenFile file;
  AlignedBytes memory = random_bytes(kOperations * kBytes, 9);
  const AlignedBytes written = memory;
  {
    const auto queue = engine_->open_queue(kOperations);
    for (std::size_t i = 0; i < kOperations; ++i) {
      queue->submit({Direction::write, &file.get(), i * kBytes, memory.data() + i * kBytes, kBytes, nullptr});
    }
  }
  std::fill(memory.begin(), memory.end(), std::byte{0});  // it is ours again
  AlignedBytes found(written.size());
  read_file_at(file.get(), 0, found);
  EXPECT_EQ(found, written);
}

TEST_P(IoEngineTest, a_queue_ends_though_nobody_used_it) {
  const auto unused = engine_->open_queue(4);
  const auto woken = engine_->open_queue(4);
  woken->wake();
}

}  // namespace
}  // namespace terrace
