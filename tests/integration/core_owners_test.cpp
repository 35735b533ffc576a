// A session's threads run on the hardware threads that its work owns; the program's, where they did before.

#include <algorithm>
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "offload/core_shares.h"
#include "tests/integration/mlp_world.h"
#include "tests/offload/threads_of_process.h"

namespace terrace::testing {
namespace {

TEST(CoreOwners, updates_run_on_what_compute_leaves_and_the_programs_threads_are_not_bound) {
  const Processors all = processors_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "this process may run on one hardware thread only";
  at::set_num_threads(1);
  const CoreShares cores = share_cores(1, std::nullopt);
  ASSERT_EQ(cores.update.processors.size(), all.size() - 1);
  const auto before = threads_of_process();
  {
    const Config config = tight();
    World world(&config);
    const auto optimizer = world.adamw(usual());
    Tensors losses;
    for (int i = 0; i < 3; ++i) world.train(*optimizer, losses);
    world.session->synchronize();
    std::size_t bound = 0;
    const auto give_up_at = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (bound == 0 && std::chrono::steady_clock::now() < give_up_at) {  // the background may be about to begin
      for (const auto& [thread, processors] : threads_of_process()) {
        if (!before.contains(thread) && processors == cores.update.processors) ++bound;
      }
    }
    EXPECT_GT(bound, 0u);
    for (const auto& [thread, processors] : threads_of_process()) {
      if (before.contains(thread)) {
        EXPECT_EQ(processors, before.at(thread)) << "thread " << thread << " is the program's";
      }
    }
  }
  EXPECT_EQ(processors_of_this_thread(), all);
}

}  // namespace
}  // namespace terrace::testing
