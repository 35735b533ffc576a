#include "tools/paced_engine.h"

#include <algorithm>
#include <array>
#include <fcntl.h>
#include <future>
#include <memory>
#include <optional>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/error.h"
#include "offload/thread_engine.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

constexpr std::size_t bytes = 4096;

class PacedEngineTest : public ::testing::Test {
 protected:
  ~PacedEngineTest() override { close(file_.descriptor); }

  std::unique_ptr<IoQueue> queue(std::uint64_t bytes_per_second, std::size_t depth = 4) {
    engine_.emplace(std::make_unique<ThreadEngine>(), bytes_per_second);
    return engine_->open_queue(depth);
  }
  IoOperation operation(IoOperation::Direction direction, std::size_t block) {
    return {.direction = direction,
            .file = &file_,
            .offset = block * bytes,
            .memory = memory_[block].data(),
            .bytes = bytes,
            .owner = memory_[block].data()};
  }
  static void wait_for(IoQueue& queue, std::size_t count, std::vector<IoCompletion>& done) {
    while (done.size() < count) queue.wait(done);
  }

  const TemporaryFolder folder_;
  const IoFile file_{open((folder_.path() / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600),
                     folder_.path() / "file"};
  std::array<std::array<std::byte, bytes>, 4> memory_{};
  std::optional<PacedEngine> engine_;
};

TEST_F(PacedEngineTest, what_is_written_is_read_again_and_each_owner_hears_of_its_own) {
  const auto paced = queue(1'000'000'000);
  for (std::size_t block = 0; block < 4; ++block) {
    memory_[block].fill(static_cast<std::byte>(block + 1));
    paced->submit(operation(IoOperation::Direction::write, block));
  }
  EXPECT_EQ(paced->in_flight(), 4u);
  std::vector<IoCompletion> done;
  wait_for(*paced, 4, done);
  EXPECT_EQ(paced->in_flight(), 0u);
  for (auto& block : memory_) {
    EXPECT_EQ(std::count_if(done.begin(), done.end(), [&](const auto& each) { return each.owner == block.data(); }), 1);
    block.fill({});
  }
  done.clear();
  for (std::size_t block = 0; block < 4; ++block) paced->submit(operation(IoOperation::Direction::read, block));
  wait_for(*paced, 4, done);
  for (std::size_t block = 0; block < 4; ++block)
    EXPECT_EQ(memory_[block][bytes - 1], static_cast<std::byte>(block + 1));
}

TEST_F(PacedEngineTest, bytes_of_all_queues_take_what_the_rate_says) {
  const auto first = queue(400'000);  // a block in 10.24 ms
  const auto second = engine_->open_queue(4);
  const std::int64_t started_ns = monotonic_ns();
  for (std::size_t block = 0; block < 4; ++block) {
    (block < 2 ? first : second)->submit(operation(IoOperation::Direction::write, block));
  }
  std::vector<IoCompletion> done;
  wait_for(*first, 2, done);
  EXPECT_GE(monotonic_ns() - started_ns, 20'480'000);
  done.clear();
  wait_for(*second, 2, done);
  EXPECT_GE(monotonic_ns() - started_ns, 40'960'000);
}

TEST_F(PacedEngineTest, an_operation_that_is_not_due_is_not_handed_out_and_a_wake_ends_the_wait_for_it) {
  const auto paced = queue(1);
  paced->submit(operation(IoOperation::Direction::write, 0));
  std::vector<IoCompletion> done;
  auto waiting = std::async(std::launch::async, [&] { paced->wait(done); });
  paced->wake();
  waiting.get();
  EXPECT_TRUE(done.empty());
  EXPECT_EQ(paced->in_flight(), 1u);
}

TEST_F(PacedEngineTest, errors_come_through) {
  const auto paced = queue(1'000'000'000, 1);
  paced->submit(operation(IoOperation::Direction::read, 3));  // beyond the end of the file
  EXPECT_THROW(paced->submit(operation(IoOperation::Direction::read, 2)), LogicError);
  std::vector<IoCompletion> done;
  wait_for(*paced, 1, done);
  EXPECT_THROW(std::rethrow_exception(done[0].error), IoError);
}

}  // namespace
}  // namespace terrace
