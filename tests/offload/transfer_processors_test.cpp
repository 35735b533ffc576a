// The transfer service's threads, and those of an engine, run where they were told to. The thread that makes them does
// not.

#include <map>
#include <memory>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "offload/choose_engine.h"
#include "tests/offload/threads_of_process.h"
#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

class TransferProcessors : public testing::TestWithParam<std::string> {};

TEST_P(TransferProcessors, are_where_all_threads_of_the_service_run) {
  const Processors all = processors_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "this process may run on one hardware thread only";
  if (GetParam() == "io_uring" && !UringEngine::available()) GTEST_SKIP() << "io_uring is not available here";
  const Processors one{all.back()};
  const TemporaryFolder folder;
  EmulatedDevice emulated(64 << 20);
  HostArena arena(granule, 16);
  NvmeStore store({folder.path()}, extent_file_bytes(granule, 4), granule);
  std::thread([] {}).join();  // with the first, a sanitizer starts one of its own
  const auto before = threads_of_process();
  const std::unique_ptr<IoEngine> engine = make_io_engine(GetParam(), one);
  const TransferService service(emulated, arena, &store, engine.get(), {.processors = one});
  const std::map<int, Processors> threads = new_threads(before, one);
  EXPECT_GE(threads.size(), link_count);
  for (const auto& [thread, processors] : threads) EXPECT_EQ(processors, one) << "thread " << thread;
  EXPECT_EQ(processors_of_this_thread(), all);
}

INSTANTIATE_TEST_SUITE_P(Engines, TransferProcessors, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace terrace
