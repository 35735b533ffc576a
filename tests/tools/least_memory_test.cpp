#include "tools/least_memory.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "tools/gpt.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t MiB = 1024 * 1024;

MemoryUsage empty_session(std::uint64_t device, std::uint64_t host, std::uint64_t nvme = 0) {
  MemoryUsage usage;
  usage.tiers[index_of(Tier::device)].capacity = device;
  usage.tiers[index_of(Tier::host)].capacity = host;
  usage.tiers[index_of(Tier::nvme)].capacity = nvme;
  return usage;
}

std::string hint_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const OutOfMemory& error) {
    return error.hint();
  }
  return "";
}

TEST(LeastMemory, counts_the_parameters_that_the_model_has) {
  for (const std::int64_t layers : {1, 3}) {
    Config::Model model;
    model.layers = layers;
    model.heads = 2;
    model.width = 32;
    model.sequence = 24;
    const Gpt made(GptOptions{.layers = layers, .heads = 2, .width = 32, .sequence = 24});
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : made->parameters()) parameters += parameter.numel();
    EXPECT_EQ(count_parameters(model), parameters);
  }
}

TEST(LeastMemory, any_number_of_layers_of_any_width_takes_no_time_and_more_than_there_is) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  Config config;
  config.model.layers = 1'000'000'000;
  EXPECT_EQ(count_parameters(config.model), 789'760'000'131'584);
  config.model = {.layers = most, .width = most, .sequence = most};
  config.train.micro_batch = most;
  EXPECT_EQ(count_parameters(config.model), std::numeric_limits<std::int64_t>::max());
  for (const char* const activations : {"keep", "auto", "recompute"}) {
    config.placement.activations = activations;
    EXPECT_EQ(least_device_bytes(config), std::numeric_limits<std::uint64_t>::max());
  }
}

TEST(LeastMemory, tiers_that_do_not_hold_the_training_state_are_refused_with_what_nvme_lacks) {
  Config config;
  const std::uint64_t state = 16 * static_cast<std::uint64_t>(count_parameters(config.model));
  const std::uint64_t for_states = 8 * MiB;  // of the device, with one gradient
  const auto gradient = 4 * sizeof(float) * static_cast<std::uint64_t>(config.model.width * config.model.width);
  const std::uint64_t device = least_device_bytes(config) + for_states - gradient;
  const std::uint64_t headers = MiB;
  const auto hint = [&](std::uint64_t nvme) {
    config.nvme.memory = nvme + headers;
    return hint_of([&] { require_least_memory(config, 16, empty_session(device, 16 * MiB, nvme)); });
  };
  const std::uint64_t least = state - for_states - 16 * MiB;
  EXPECT_EQ(hint(least - 1), "raise nvme.memory to at least " + format_bytes_exactly(least + headers));
  EXPECT_EQ(hint(least), "");
}

TEST(LeastMemory, without_a_session_what_memory_does_not_hold_is_refused) {
  EXPECT_EQ(hint_of([] { require_available_memory(MiB, MiB); }), "");
  EXPECT_THAT(hint_of([] { require_available_memory(MiB + 1, MiB); }), HasSubstr("without --unmanaged"));
}

TEST(LeastMemory, recomputing_needs_less_and_a_larger_batch_more) {
  Config config;
  config.model.layers = 8;
  config.placement.activations = "keep";
  const std::uint64_t kept = least_device_bytes(config);
  config.placement.activations = "recompute";
  EXPECT_LT(least_device_bytes(config), kept / 2);
  config.placement.activations = "keep";
  config.train.micro_batch *= 2;
  EXPECT_GT(least_device_bytes(config), kept * 3 / 2);
}

TEST(LeastMemory, a_device_that_holds_no_step_is_refused_with_what_it_takes) {
  const Config config;
  const std::uint64_t least = least_device_bytes(config);
  EXPECT_THAT(hint_of([&] { require_least_memory(config, 16, empty_session(least - 1, 1024 * MiB)); }),
              HasSubstr("device.memory to at least " + format_bytes_exactly(least)));
  EXPECT_EQ(hint_of([&] { require_least_memory(config, 16, empty_session(least, 1024 * MiB)); }), "");
}

TEST(LeastMemory, without_nvme_host_and_device_hold_all_of_the_training_state) {
  const Config config;
  EXPECT_THAT(hint_of([&] { require_least_memory(config, 16, empty_session(256 * MiB, MiB)); }),
              HasSubstr("raise host.memory to at least "));
  const std::uint64_t gibibyte_of_states = 1024 * MiB / static_cast<std::uint64_t>(count_parameters(config.model));
  EXPECT_NE(hint_of([&] { require_least_memory(config, gibibyte_of_states, empty_session(256 * MiB, 768 * MiB)); }),
            "");
}

TEST(LeastMemory, with_nvme_the_host_holds_an_update_of_the_largest_matrix) {
  Config config;
  config.model.width = 64;
  MemoryUsage usage = empty_session(1024 * MiB, 0, 1024 * MiB);
  MemoryUsage::OfTier& host = usage.tiers[index_of(Tier::host)];
  host.now = MiB;  // staging
  const std::uint64_t least = MiB + std::uint64_t{16} * 4 * 64 * 64;
  host.capacity = least - 1;
  EXPECT_EQ(hint_of([&] { require_least_memory(config, 16, usage); }),
            "raise host.memory to at least " + format_bytes_exactly(least));
  host.capacity = least;
  EXPECT_EQ(hint_of([&] { require_least_memory(config, 16, usage); }), "");
}

TEST(LeastMemory, what_is_told_to_rest_on_a_tier_is_counted_there) {
  Config config;
  const auto elements = static_cast<std::uint64_t>(count_parameters(config.model));
  const auto hint = [&](std::uint64_t host, std::uint64_t nvme) {
    return hint_of([&] { require_least_memory(config, 16, empty_session(1024 * MiB, host, nvme)); });
  };
  const std::uint64_t matrix = 4 * static_cast<std::uint64_t>(config.model.width * config.model.width);
  config.placement.optimizer = Config::Shares{.host = 1};
  const std::uint64_t least_host = 8 * elements + (16 - 8) * matrix;
  EXPECT_EQ(hint(least_host - 1, 1024 * MiB), "raise host.memory to at least " + format_bytes_exactly(least_host));
  EXPECT_EQ(hint(least_host, 1024 * MiB), "");
  config.placement.optimizer = Config::Shares{.nvme = 1};
  config.placement.gradients = Config::Shares{.nvme = 1};
  EXPECT_EQ(hint(512 * MiB, 12 * elements - 1), "raise nvme.memory to at least " + format_bytes_exactly(12 * elements));
  EXPECT_EQ(hint(512 * MiB, 12 * elements), "");
}

}  // namespace
}  // namespace terrace
