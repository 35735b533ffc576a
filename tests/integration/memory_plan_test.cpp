// How a session's tiers are divided: what moves at a time, and how much of it, by setting, by measurement, or by
// default.

#include "integration/memory_plan.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/nvme_worker.h"
#include "offload/transfer_service.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1 << 20;

class MemoryPlanTest : public testing::Test {
 protected:
  MemoryPlanTest() {
    config_.host.memory = 256 * kMiB;
    config_.nvme.memory = 64 * kMiB;
    config_.nvme.paths = {folder_.path()};
    config_.placement.chunk = 32 * kMiB;
  }

  MemoryPlan plan() const { return plan_memory(config_, 256 * kMiB, 4096, 1024 * kMiB, rates_); }

  void measured(const std::filesystem::path& folder, std::size_t block_bytes, std::size_t depth) {
    rates_.paths[path_key(folder)] = {1e9, 1e9, "io_uring", block_bytes, depth, true, ""};
  }

  const TemporaryFolder folder_;
  const TemporaryFolder other_;
  Config config_;
  Rates rates_;
};

TEST_F(MemoryPlanTest, moves_blocks_by_the_size_of_a_chunk_where_nothing_was_measured) {
  EXPECT_EQ(plan().granule_bytes, kMiB);
  EXPECT_EQ(plan().nvme_depth, NvmeWorker::default_depth(kMiB));
  config_.placement.chunk = 4 * kMiB;
  EXPECT_EQ(plan().granule_bytes, kMiB / 8);
  EXPECT_EQ(plan().nvme_depth, NvmeWorker::default_depth(kMiB / 8));
}

TEST_F(MemoryPlanTest, moves_what_was_measured_to_be_best_for_its_drives) {
  measured(folder_.path(), kMiB / 4, 16);
  EXPECT_EQ(plan().granule_bytes, kMiB / 4);
  EXPECT_EQ(plan().nvme_depth, 16U);
  config_.placement.chunk = 4 * kMiB;  // whose blocks are smaller, and as many bytes go at a time
  EXPECT_EQ(plan().granule_bytes, kMiB / 8);
  EXPECT_EQ(plan().nvme_depth, 32U);
}

TEST_F(MemoryPlanTest, gives_each_of_several_drives_what_it_needs) {
  config_.nvme.paths.push_back(other_.path());
  measured(folder_.path(), kMiB / 4, 16);
  EXPECT_EQ(plan().nvme_depth, NvmeWorker::default_depth(kMiB / 4)) << "of the other nothing is known";
  measured(other_.path(), kMiB, 8);
  EXPECT_EQ(plan().granule_bytes, kMiB);
  EXPECT_EQ(plan().nvme_depth, 12U);
}

TEST_F(MemoryPlanTest, takes_several_drives_for_as_many_of_the_slowest_as_they_have_equal_shares) {
  config_.nvme.paths.push_back(other_.path());
  measured(folder_.path(), kMiB, 8);
  rates_.paths.begin()->second.read = 1e9;
  rates_.paths.begin()->second.write = 3e9;
  EXPECT_EQ(plan().nvme_read_rate, 0) << "of the other nothing is known";
  measured(other_.path(), kMiB, 8);
  auto& other = rates_.paths.at(path_key(other_.path()));
  other.read = 7e9;
  other.write = 2e9;
  EXPECT_EQ(plan().nvme_read_rate, 2e9);
  EXPECT_EQ(plan().nvme_write_rate, 4e9);
  other.direct = false;
  EXPECT_EQ(plan().nvme_read_rate, 0) << "of the page cache";
}

TEST_F(MemoryPlanTest, goes_by_no_measurement_of_the_page_cache) {
  measured(folder_.path(), kMiB / 4, 16);
  rates_.paths.begin()->second.direct = false;
  EXPECT_EQ(plan().granule_bytes, kMiB);
  EXPECT_EQ(plan().nvme_depth, NvmeWorker::default_depth(kMiB));
}

TEST_F(MemoryPlanTest, stages_as_much_as_keeps_up_with_a_full_queue_where_that_is_little_of_the_host) {
  config_.placement.chunk = 4 * kMiB;
  config_.host.memory = 4096 * kMiB;
  EXPECT_EQ(plan().staging_blocks_each_way * plan().granule_bytes, 16 * kMiB);
  config_.host.memory = 512 * kMiB;
  EXPECT_EQ(plan().staging_blocks_each_way * plan().granule_bytes, 8 * kMiB);
  config_.host.memory = 16 * kMiB;
  EXPECT_EQ(plan().staging_blocks_each_way, TransferService::staging_blocks_each_way);
  config_.io.block = kMiB / 16;
  config_.host.memory = 64 * kMiB;
  EXPECT_EQ(plan().staging_blocks_each_way * plan().granule_bytes, kMiB / 2) << "of a small host";
  config_.io.block.reset();
  config_.placement.chunk = 32 * kMiB;
  config_.host.memory = 256 * kMiB;
  EXPECT_EQ(plan().staging_blocks_each_way, TransferService::staging_blocks_each_way) << "of larger blocks";
  config_.placement.chunk = 4 * kMiB;
  config_.nvme.paths.clear();
  EXPECT_EQ(plan().staging_blocks_each_way, TransferService::staging_blocks_each_way) << "with no drive";
}

TEST_F(MemoryPlanTest, tells_the_least_host_that_holds_more_beside_staging_that_grows_with_it) {
  config_.placement.chunk = 4 * kMiB;
  config_.host.memory = 16 * kMiB;
  for (const std::uint64_t beside : {12 * kMiB, 300 * kMiB, 8192 * kMiB}) {
    const std::uint64_t least = plan().host_memory_for(plan().staging_bytes() + beside);
    config_.host.memory = least;
    EXPECT_GE(least - plan().staging_bytes(), beside);
    config_.host.memory = least - 1;
    EXPECT_LT(least - 1 - plan().staging_bytes(), beside);
  }
}

TEST_F(MemoryPlanTest, has_room_for_as_much_after_a_measurement_as_before) {
  config_.nvme.memory.reset();
  const std::uint64_t before = plan().nvme_capacity;
  measured(folder_.path(), kMiB / 4, 16);
  EXPECT_EQ(plan().nvme_capacity, before);
}

TEST_F(MemoryPlanTest, does_as_it_is_told_whatever_was_measured) {
  measured(folder_.path(), kMiB / 4, 16);
  config_.io.block = 12 * 4096;
  config_.io.depth = 3;
  EXPECT_EQ(plan().granule_bytes, 12U * 4096);
  EXPECT_EQ(plan().nvme_depth, 3U);
}

TEST_F(MemoryPlanTest, refuses_blocks_larger_than_a_chunk) {
  config_.io.block = 64 * kMiB;
  try {
    plan();
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("io.block (64MiB) is more than a chunk (32MiB)"));
    EXPECT_THAT(error.hint(), HasSubstr("placement.chunk"));
  }
}

}  // namespace
}  // namespace terrace
