// What a training's step leaves to be done behind the next one.

#include "tools/training.h"

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace terrace::testing {
namespace {

struct TrainingTest : ::testing::Test {
  TrainingTest() {
    std::ofstream text(folder.path() / "text.txt");
    for (int line = 0; line < 1000; ++line) text << "line " << line << " of a text to learn\n";
    text.close();
    config.device.memory = 8 << 20;
    config.host.memory = 16 << 20;
    config.log.level = LogLevel::error;
    config.model = {.layers = 2, .heads = 2, .width = 64, .sequence = 32};
    config.train.micro_batch = 2;
    config.data.paths = {folder.path() / "text.txt"};
  }

  const TemporaryFolder folder;
  Config config;
};

TEST_F(TrainingTest, a_step_waits_for_no_gradient_norm_and_each_has_its_own) {
  // Updates are run by whoever needs them.
  at::set_num_threads(static_cast<int>(std::max(2U, std::thread::hardware_concurrency())));
  const Dataset dataset(config.data.paths, config.model.sequence);
  std::vector<double> expected;
  {
    Training unmanaged(config, dataset, /*unmanaged=*/true);
    for (int step = 1; step <= 3; ++step) {
      unmanaged.step();
      expected.push_back(unmanaged.gradient_norm_of(step).value());
    }
  }
  Training training(config, dataset, /*unmanaged=*/false);
  EXPECT_FALSE(training.step().gradient_norm.has_value());
  EXPECT_EQ(training.usage().update_seconds, 0);
  for (int step = 2; step <= 3; ++step) {
    training.step();
    EXPECT_GT(training.usage().update_seconds, 0);
    EXPECT_EQ(training.gradient_norm_of(step - 1), expected.at(static_cast<std::size_t>(step) - 2));
  }
  EXPECT_EQ(training.gradient_norm_of(3), expected.at(2));
  EXPECT_EQ(training.gradient_norm_of(2), expected.at(1));
}

}  // namespace
}  // namespace terrace::testing
