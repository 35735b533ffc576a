#include <gtest/gtest.h>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {

TEST(FirstTry, trains_as_without_a_session) {
  TrainingOptions options;
  options.steps = 3;
  const auto plain = train_small_gpt(options);
  const auto config = Config::parse("device.memory='8MiB'\nhost.memory='8MiB'\n[device]\nchunks='300KiB'\n[placement]\nchunk='64KiB'");
  const auto managed = train_small_gpt(options, config, [](Session& s) {
    const auto usage = s.memory_usage();
    for (auto tier : all_tiers) std::cout << name_of(tier) << " " << usage.now(tier) << " peak " << usage.peak(tier) << " chunks " << usage.chunk_peak(tier) << "\n";
  });
  EXPECT_EQ(plain.losses, managed.losses);
  EXPECT_EQ(plain.norms, managed.norms);
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) EXPECT_TRUE(same_bits(plain.parameters[i], managed.parameters[i]));
}

}  // namespace terrace::testing
