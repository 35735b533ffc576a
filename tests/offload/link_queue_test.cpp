#include "offload/link_queue.h"

#include <array>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

using enum TransferPriority;

/// Two staging blocks; jobs are named by a letter.
class LinkQueueTest : public testing::Test {
 protected:
  std::shared_ptr<TransferJob> job(char name, TransferPriority priority, Tier to = Tier::host) {
    auto job = std::make_shared<TransferJob>();
    job->id = static_cast<TransferId>(next_id_++);
    job->request.from = Tier::nvme;
    job->request.to = to;
    job->request.priority = priority;
    job->request.bytes = static_cast<unsigned char>(name);
    job->route = route_of(job->request);
    return job;
  }
  std::shared_ptr<TransferJob> queue(char name, TransferPriority priority, Tier to = Tier::host,
                                     std::size_t blocks = 2) {
    std::shared_ptr<TransferJob> queued = job(name, priority, to);
    queued->blocks = blocks;
    queue_.push(queued);
    return queued;
  }
  /// What starts now: a name and a block's index each; a star for staging.
  std::string pop_all() {
    std::string order;
    while (const std::optional<TransferBlock> block = queue_.pop(staging_)) {
      order += static_cast<char>(block->job->request.bytes);
      order += std::to_string(block->index);
      if (block->staging != nullptr) order += '*';
    }
    return order;
  }

  HostArena arena_{4096, 2};
  Staging staging_{arena_, 2};
  LinkQueue queue_;
  std::uint64_t next_id_ = 1;
};

TEST_F(LinkQueueTest, gives_what_is_more_urgent_than_something_else_and_nothing_that_is_not) {
  queue('a', write_back);
  queue('b', prefetch);
  EXPECT_FALSE(queue_.pop_before(demand, staging_));
  EXPECT_FALSE(queue_.pop_before(prefetch, staging_));
  EXPECT_EQ(queue_.pop_before(write_back, staging_)->job->request.bytes, 'b');
  EXPECT_EQ(queue_.pop_before(early, staging_)->job->request.bytes, 'b');
  EXPECT_EQ(queue_.pop_before(early, staging_)->job->request.bytes, 'a');
  EXPECT_EQ(pop_all(), "a1");
}

TEST_F(LinkQueueTest, gives_nothing_more_urgent_either_when_it_is_a_write_back_s_turn) {
  queue('a', write_back);
  queue('b', demand, Tier::host, 2 * LinkQueue::most_urgent_in_a_row);
  for (std::size_t i = 0; i < LinkQueue::most_urgent_in_a_row; ++i) {
    ASSERT_TRUE(queue_.pop_before(prefetch, staging_)) << i;
  }
  EXPECT_FALSE(queue_.pop_before(prefetch, staging_));
  EXPECT_EQ(queue_.pop(staging_)->job->request.bytes, 'a');
  EXPECT_EQ(queue_.pop_before(prefetch, staging_)->job->request.bytes, 'b');
}

TEST_F(LinkQueueTest, gives_the_most_urgent_first_and_then_who_came_first) {
  queue('a', write_back);
  queue('b', early);
  queue('c', demand);
  queue('d', prefetch);
  queue('e', demand);
  EXPECT_EQ(pop_all(), "c0c1e0e1d0d1a0a1b0b1");
}

TEST_F(LinkQueueTest, lends_staging_to_the_most_urgent_and_lets_the_rest_pass_when_it_is_out) {
  queue('a', prefetch, Tier::device);
  queue('b', demand, Tier::device, 1);
  queue('c', write_back);
  EXPECT_EQ(pop_all(), "b0*a0*c0c1");
  EXPECT_EQ(pop_all(), "") << "the rest waits for staging";
}

TEST_F(LinkQueueTest, a_raised_job_takes_all_of_its_waiting_blocks_along) {
  queue('a', prefetch);
  const std::shared_ptr<TransferJob> raised = queue('b', early, Tier::host, 3);
  EXPECT_EQ(queue_.pop(staging_)->job->request.bytes, 'a');
  raised->request.priority = demand;
  queue_.raise(raised, early);
  EXPECT_EQ(pop_all(), "b0b1b2a1");
}

TEST_F(LinkQueueTest, a_block_on_its_second_link_takes_its_turn_by_its_transfer) {
  const std::shared_ptr<TransferJob> passed_on = job('a', prefetch, Tier::device);
  const std::shared_ptr<TransferJob> raised = job('b', write_back, Tier::device);
  queue('c', prefetch, Tier::host, 1);
  queue('d', demand, Tier::host, 1);
  queue_.push({.job = raised, .index = 7});
  queue_.push({.job = passed_on, .index = 5});
  queue_.push({.job = passed_on, .index = 3});
  raised->request.priority = demand;
  queue_.raise(raised, write_back);
  EXPECT_EQ(pop_all(), "b7d0a3a5c0");
}

TEST_F(LinkQueueTest, a_stream_of_demands_does_not_starve_a_write_back) {
  queue('w', write_back, Tier::host, 2);
  queue('e', early, Tier::host, 1);
  std::string order;
  for (int i = 0; i < 40; ++i) {
    queue('d', demand, Tier::host, 2);  // more than leave
    order += static_cast<char>(queue_.pop(staging_)->job->request.bytes);
  }
  const std::string row(LinkQueue::most_urgent_in_a_row, 'd');
  EXPECT_EQ(order, row + 'w' + row + 'w' + std::string(40 - 2 * row.size() - 2, 'd'));
}

TEST_F(LinkQueueTest, a_stream_of_demands_does_not_starve_a_block_that_holds_staging) {
  const std::shared_ptr<TransferJob> staged = job('s', early, Tier::device);
  queue_.push(TransferBlock{.job = staged, .index = 0, .staging = staging_.try_take()});
  queue_.push(TransferBlock{.job = staged, .index = 1, .staging = staging_.try_take()});
  std::string order;
  for (int i = 0; i < 40; ++i) {
    queue('d', demand, Tier::host, 2);  // more than leave
    const bool is_others_turn = i % 2 == 1;
    std::optional<TransferBlock> block = is_others_turn ? queue_.pop_before(early, staging_) : std::nullopt;
    block = block ? std::move(block) : queue_.pop(staging_);
    order += static_cast<char>(block->job->request.bytes);
  }
  const std::string row(LinkQueue::most_urgent_in_a_row, 'd');
  EXPECT_EQ(order, row + 's' + row + 's' + std::string(40 - 2 * row.size() - 2, 'd'));
}

TEST_F(LinkQueueTest, a_write_back_that_waits_for_staging_keeps_its_turn) {
  queue('w', write_back, Tier::device, 1);
  std::array<std::byte*, 2> lent{staging_.try_take(), staging_.try_take()};
  const std::size_t rounds = LinkQueue::most_urgent_in_a_row + 3;
  for (std::size_t i = 0; i < rounds; ++i) {
    queue('d', demand, Tier::host, 1);
    EXPECT_EQ(queue_.pop(staging_)->job->request.bytes, 'd');
  }
  staging_.give_back(lent[0]);
  queue('d', demand, Tier::host, 1);
  EXPECT_EQ(pop_all(), "w0*d0");
}

TEST_F(LinkQueueTest, a_block_of_a_failed_transfer_needs_no_staging_to_end) {
  queue('a', demand, Tier::device);
  const std::shared_ptr<TransferJob> failed = queue('b', prefetch, Tier::device);
  EXPECT_EQ(queue_.pop(staging_)->index, 0u);
  EXPECT_EQ(queue_.pop(staging_)->index, 1u);
  failed->error = std::make_exception_ptr(IoError("the drive is gone"));
  EXPECT_EQ(pop_all(), "b0b1");
}

}  // namespace
}  // namespace terrace
