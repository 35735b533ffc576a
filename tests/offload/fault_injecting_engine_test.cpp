/// That the engine which does wrong on purpose does what it was told; without rules it keeps every promise of an
/// engine, see io_engine_test.cpp.
#include "tests/offload/fault_injecting_engine.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "offload/file_io.h"
#include "offload/thread_engine.h"
#include "tests/offload/open_file.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::size_t kBytes = 16384;

class FaultInjectingEngineTest : public testing::Test {
 protected:
  /// Runs operations in flight at once and gives "ok" or the message of each, in the order of completion, with the
  /// numbers of the operations in `order_`.
  std::vector<std::string> run(Direction direction, int count) {
    const auto queue = engine_.open_queue(static_cast<std::size_t>(count));
    std::vector<int> numbers(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) {
      numbers[static_cast<std::size_t>(i)] = i;
      queue->submit({direction, &file_.get(), 0, memory_.data(), kBytes, &numbers[static_cast<std::size_t>(i)]});
    }
    std::vector<IoCompletion> done;
    while (queue->in_flight() > 0) queue->wait(done);
    std::vector<std::string> results;
    order_.clear();
    for (const IoCompletion& completion : done) {
      order_.push_back(*static_cast<int*>(completion.owner));
      try {
        if (completion.error) std::rethrow_exception(completion.error);
        results.emplace_back("ok");
      } catch (const IoError& error) {
        results.push_back(error.message());
      }
    }
    return results;
  }
  std::string result_of(Direction direction) { return run(direction, 1).at(0); }

  AlignedBytes on_disk() const {
    AlignedBytes bytes(kBytes);
    read_file_at(file_.get(), 0, bytes);
    return bytes;
  }

  static int different_bits(const AlignedBytes& a, const AlignedBytes& b) {
    int bits = 0;
    for (std::size_t i = 0; i < kBytes; ++i) bits += __builtin_popcount(static_cast<unsigned>(a[i] ^ b[i]));
    return bits;
  }

  OpenFile file_;
  AlignedBytes memory_ = random_bytes(kBytes, 1);
  std::vector<int> order_;
  FaultInjectingEngine engine_{std::make_unique<ThreadEngine>()};
};

TEST_F(FaultInjectingEngineTest, fails_with_the_cause_it_was_told_and_moves_nothing) {
  write_file_at(file_.get(), 0, random_bytes(kBytes, 2));
  engine_.inject({.fault = Fault::no_space});
  EXPECT_EQ(result_of(Direction::write), "nvme: write of 16384 B at offset 0 to " + file_.get().path.string() +
                                             " failed: No space left on device (ENOSPC)");
  EXPECT_EQ(on_disk(), random_bytes(kBytes, 2));
  engine_.heal();
  EXPECT_EQ(result_of(Direction::write), "ok");
  EXPECT_EQ(on_disk(), memory_);
}

TEST_F(FaultInjectingEngineTest, moves_half_and_then_fails) {
  write_file_at(file_.get(), 0, random_bytes(kBytes, 2));
  engine_.inject({.fault = Fault::short_transfer});
  EXPECT_NE(result_of(Direction::write).find("failed: no byte was taken after 8192 B"), std::string::npos);
  AlignedBytes expected = random_bytes(kBytes, 2);
  std::copy_n(memory_.begin(), 8192, expected.begin());
  EXPECT_EQ(on_disk(), expected);
  EXPECT_NE(result_of(Direction::read).find("failed: end of file after 8192 B"), std::string::npos);
}

TEST_F(FaultInjectingEngineTest, flips_one_bit_in_silence) {
  engine_.inject({.fault = Fault::flipped_bit});
  const AlignedBytes before = memory_;
  EXPECT_EQ(result_of(Direction::write), "ok");
  EXPECT_EQ(memory_, before) << "the memory of a write is not ours to change";
  EXPECT_EQ(different_bits(on_disk(), before), 1);
  EXPECT_EQ(result_of(Direction::read), "ok");
  EXPECT_EQ(different_bits(on_disk(), memory_), 1);
}

TEST_F(FaultInjectingEngineTest, completes_late_what_it_was_told_to_hold_back) {
  engine_.inject({.fault = Fault::late, .direction = Direction::write, .nth = 0});
  const std::vector<std::string> results = run(Direction::write, 4);
  EXPECT_EQ(results, std::vector<std::string>(4, "ok"));
  EXPECT_NE(order_.front(), 0);
  engine_.heal();
  engine_.inject({.fault = Fault::late});
  EXPECT_EQ(run(Direction::write, 4).size(), 4U) << "all late: none is lost";
}

TEST_F(FaultInjectingEngineTest, chooses_by_direction_ordinal_predicate_and_seed) {
  run(Direction::write, 1);
  engine_.inject({.direction = Direction::read, .nth = 1});
  EXPECT_EQ(result_of(Direction::read), "ok");
  EXPECT_EQ(result_of(Direction::write), "ok");
  EXPECT_NE(result_of(Direction::read), "ok");
  EXPECT_EQ(result_of(Direction::read), "ok");
  EXPECT_EQ(engine_.seen(Direction::read), 3U);
  EXPECT_EQ(engine_.seen(Direction::write), 2U);

  engine_.heal();
  engine_.inject({.when = [](const IoOperation& operation) { return operation.offset > 0; }});
  EXPECT_EQ(result_of(Direction::read), "ok");

  engine_.heal();
  engine_.inject({.probability = 0.5});
  int failed = 0;
  for (int i = 0; i < 100; ++i) failed += result_of(Direction::read) != "ok" ? 1 : 0;
  EXPECT_GT(failed, 20);
  EXPECT_LT(failed, 80);
}

TEST_F(FaultInjectingEngineTest, tells_what_befell_what) {
  engine_.inject({.fault = Fault::flipped_bit, .direction = Direction::read});
  run(Direction::write, 1);
  EXPECT_TRUE(engine_.injected().empty());
  run(Direction::read, 1);
  ASSERT_EQ(engine_.injected().size(), 1U);
  const InjectedFault injected = engine_.injected().front();
  EXPECT_EQ(injected.fault, Fault::flipped_bit);
  EXPECT_EQ(injected.direction, Direction::read);
  EXPECT_EQ(injected.path, file_.get().path.string());
  EXPECT_EQ(injected.offset, 0U);
  EXPECT_EQ(injected.bytes, kBytes);
}

TEST_F(FaultInjectingEngineTest, holds_writes_back_until_they_are_let_through) {
  write_file_at(file_.get(), 0, random_bytes(kBytes, 2));
  engine_.hold_writes();
  const auto queue = engine_.open_queue(4);
  int number = 0;
  AlignedBytes read_into(kBytes);
  queue->submit({Direction::write, &file_.get(), 0, memory_.data(), kBytes, &number});
  queue->submit({Direction::read, &file_.get(), 0, read_into.data(), kBytes, nullptr});
  std::vector<IoCompletion> done;
  queue->wait(done);
  ASSERT_EQ(done.size(), 1U) << "reads pass";
  EXPECT_EQ(read_into, random_bytes(kBytes, 2));
  EXPECT_EQ(queue->in_flight(), 1U);
  std::thread opener([&] { engine_.let_through(1); });
  while (queue->in_flight() > 0) queue->wait(done);
  opener.join();
  EXPECT_EQ(done.size(), 2U);
  EXPECT_EQ(on_disk(), memory_);
}

TEST_F(FaultInjectingEngineTest, fails_as_many_as_it_is_told_to) {
  std::vector<std::uint64_t> offsets;
  engine_.before_write = [&](std::uint64_t offset) { offsets.push_back(offset); };
  engine_.failing_writes = 2;
  engine_.failing_reads = 1;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(result_of(Direction::write), "nvme: write of 16384 B at offset 0 to " + file_.get().path.string() +
                                               " failed: Bad file descriptor (EBADF)");
  }
  EXPECT_EQ(result_of(Direction::write), "ok");
  EXPECT_NE(result_of(Direction::read), "ok");
  EXPECT_EQ(result_of(Direction::read), "ok");
  EXPECT_EQ(offsets, std::vector<std::uint64_t>(3, 0));
}

}  // namespace
}  // namespace terrace
