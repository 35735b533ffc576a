// Probes measure something and leave nothing. What they measure is not checked.

#include <filesystem>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/choose_engine.h"
#include "offload/emulated_device.h"
#include "offload/thread_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tools/probe_drive.h"
#include "tools/probe_link.h"
#include "tools/probe_memory.h"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr std::size_t kBlock = 64 * 1024;
constexpr std::uint64_t kMiB = 1 << 20;

bool at_once() { return true; }

TEST(ProbeDrive, reads_and_writes_in_several_ways_and_leaves_no_file) {
  const TemporaryFolder folder;
  const auto engine = make_io_engine("auto");
  const DriveRates rates = probe_drive(folder.path(), *engine, 16 * kMiB, at_once);
  EXPECT_GT(rates.read, 0);
  EXPECT_GT(rates.write, 0);
  EXPECT_EQ(rates.engine, engine->name());
  EXPECT_THAT(rates.block_bytes, testing::AnyOf(kMiB / 4, kMiB));
  EXPECT_GE(rates.depth, 1U);
  EXPECT_LE(rates.depth * rates.block_bytes, 8 * kMiB) << "half of the file";
  EXPECT_NE(rates.measured_at, "");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ProbeDrive, fails_with_the_drive_and_leaves_no_file) {
  const TemporaryFolder folder;
  FaultInjectingEngine engine(std::make_unique<ThreadEngine>());
  engine.inject({.fault = Fault::io_error, .direction = IoOperation::Direction::read});
  EXPECT_THROW(probe_drive(folder.path(), engine, 16 * kMiB, at_once), IoError);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ProbeDrive, says_how_much_it_needs_where_that_is_not_to_be_had) {
  const TemporaryFolder folder;
  ThreadEngine engine;
  try {
    probe_drive(folder.path(), engine, kMiB, at_once);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a file of 2MiB does not fit into " + folder.path().string()));
  }
}

TEST(ProbeLink, copies_both_ways_and_gives_the_slot_back) {
  EmulatedDevice device(4 * kMiB);
  const LinkRates rates = probe_link(device, kBlock, at_once);
  EXPECT_GT(rates.in, 0);
  EXPECT_GT(rates.out, 0);
  EXPECT_EQ(device.budget().used(), 0U);
}

TEST(ProbeLink, is_refused_where_two_blocks_do_not_fit) {
  EmulatedDevice device(kBlock);
  EXPECT_THROW(probe_link(device, kBlock, at_once), OutOfMemory);
}

TEST(ProbeLink, is_no_faster_than_an_emulated_link) {
  constexpr std::uint64_t per_second = 64 * kMiB;
  EmulatedDevice device(4 * kMiB, {.bytes_per_second = per_second});
  const LinkRates rates = probe_link(device, kBlock, [] { return false; });
  EXPECT_LE(rates.in, static_cast<double>(per_second));
  EXPECT_LE(rates.out, static_cast<double>(per_second));
}

TEST(ProbeMemory, measures_each_way_on_any_machine) {
  Topology several;
  several.usable_threads = 3;
  for (const Topology& topology : {Topology{}, several, read_topology()}) {
    const MemoryRates rates = probe_memory(topology, at_once);
    for (const double rate : {rates.copy_one_core, rates.copy, rates.read, rates.write}) {
      EXPECT_GT(rate, 0);
      EXPECT_LT(rate, std::numeric_limits<double>::infinity());
    }
  }
}

}  // namespace
}  // namespace terrace
