// Placement never changes results: the same losses and parameters, bit for bit, as without a session.

#include <array>
#include <filesystem>

#include <gtest/gtest.h>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

struct Combination {
  const char* name;
  const char* toml;         // sizes are for fp32; bf16 gets half the chunk and half the device chunks
  std::uint64_t chunk;      // bytes of a parameter chunk, fp32
  bool everything_crosses;  // parameters, gradients and states cross a link every step
};

constexpr Combination combinations[] = {
    {"all_on_the_host", "[host]\nmemory='24MiB'\n", 64 << 10, false},
    {"states_on_nvme", R"([host]
memory='9MiB'
[placement]
parameters={host=1}
gradients={host=1}
optimizer={nvme=1}
)",
     256 << 10, true},
    {"all_on_nvme", R"([host]
memory='4MiB'
[placement]
parameters={nvme=1}
gradients={nvme=1}
optimizer={nvme=1}
)",
     128 << 10, true},
    {"all_mixed_with_odd_chunks", R"([host]
memory='7MiB'
[placement]
parameters={host=0.5, nvme=0.5}
gradients={host=0.25, nvme=0.75}
optimizer={host=0.5, nvme=0.5}
)",
     112 << 10, true},
    {"some_on_each_tier", R"([host]
memory='7MiB'
[placement]
parameters={device=0.06, host=0.44, nvme=0.5}
gradients={host=0.5, nvme=0.5}
optimizer={host=0.2, nvme=0.8}
)",
     32 << 10, true},
    {"auto_that_overflows_to_nvme", "[host]\nmemory='5MiB'\n", 160 << 10, true},
    {"small_chunks", R"([host]
memory='6MiB'
[placement]
parameters={host=1}
gradients={nvme=1}
optimizer={nvme=1}
)",
     16 << 10, true},
    {"gradients_on_the_host_and_parameters_on_nvme", R"([host]
memory='9MiB'
[placement]
parameters={nvme=1}
gradients={host=1}
optimizer={host=0.3, nvme=0.7}
)",
     200 << 10, true},
};

constexpr std::array<const char*, 3> state_formats{"float32", "split", "split_bfloat16"};

/// How the same memory is worked with. Each combination is run in three ways, which differ in all of this.
struct Way {
  std::int64_t prefetch;
  const char* update;
  const char* engine;
  const char* activations;
  int threads;  ///< fewer than cores: updates run in the background, otherwise by whoever needs them
  std::size_t states;

  std::string name() const {
    return "prefetch " + std::to_string(prefetch) + ", " + update + ", " + engine + ", " + activations + ", " +
           std::to_string(threads) + " threads, " + state_formats[states] + " states";
  }
};

constexpr std::size_t ways = 3;

Way way_of(std::size_t combination, std::size_t way) {
  constexpr std::array<std::int64_t, ways> prefetch{0, 2, 8};
  const bool odd = (combination + way) % 2 == 1;
  const bool other = (combination / 2 + way) % 2 == 1;
  return {.prefetch = prefetch[way],
          .update = odd && way != 1 ? "immediate" : "deferred",
          .engine = other ? "auto" : "threads",  // io_uring, where it is available
          .activations = way == 2 || (way == 0 && other) ? "recompute" : "keep",
          .threads = odd != other ? 1 : 2,
          .states = (combination + way) % state_formats.size()};
}

TrainingOptions options_for(at::ScalarType type) {
  TrainingOptions options;
  options.shape.width = 128;
  options.type = type;
  return options;
}

Config config_for(const Combination& combination, const Way& way, at::ScalarType type,
                  const std::filesystem::path& folder) {
  const std::uint64_t part = type == at::kFloat ? 1 : 2;
  Config config = Config::parse(combination.toml, combination.name, {"nvme.paths=[\"" + folder.string() + "\"]"});
  config.device.memory = 4 << 20;
  config.device.chunks = (640 << 10) / part;
  config.nvme.memory = 20 << 20;
  config.placement.chunk = combination.chunk / part;
  config.placement.activations = way.activations;
  config.io.prefetch = way.prefetch;
  config.io.engine = way.engine;
  config.optimizer.update = way.update;
  config.optimizer.states = state_formats[way.states];
  if (config.optimizer.states == "split_bfloat16" && config.host.memory == std::uint64_t{9} << 20) {
    config.host.memory = part == 1 ? 8 << 20 : 5 << 20;  // more could keep all of the states that are there
  }
  return config;
}

/// Bytes that crossed any link, by kind.
std::uint64_t crossed(const MemoryUsage& usage, Kind kind) {
  std::uint64_t bytes = 0;
  for (const Link link : all_links) {
    bytes += usage.moved(link, kind);
  }
  return bytes;
}

class Identity : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("terrace-identity-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    at::set_num_threads(threads_before_);
  }

  const int threads_before_ = at::get_num_threads();
  std::filesystem::path folder_;
};

}  // namespace

TEST_P(Identity, holds_for_every_combination_of_budgets_tiers_and_chunk_sizes) {
  TrainingOptions options = options_for(GetParam());
  std::array<std::array<TrainingResult, state_formats.size()>, 2> without;  // a session, by threads and states
  for (const int threads : {1, 2}) {
    options.threads = threads;
    auto& by_states = without.at(static_cast<std::size_t>(threads - 1));
    for (std::size_t states = 0; states < state_formats.size(); ++states) {
      options.optimizer.states = state_formats[states];
      TrainingResult& expected = by_states[states];
      expected = train_small_gpt(options);
      ASSERT_LT(expected.losses.back(), expected.losses.front())
          << "the model learns nothing: the test would prove little";
      ASSERT_GT(expected.norms.front(), options.max_gradient_norm) << "clipping is not active";
    }
    EXPECT_EQ(by_states[1].losses, by_states[0].losses) << "a split master trains as a whole one";
    EXPECT_NE(by_states[2].losses, by_states[0].losses) << "moments are not of two bytes";
  }
  std::uint64_t parameter_bytes = 0;
  for (const at::Tensor& parameter : without[0][0].parameters) {
    parameter_bytes += parameter.nbytes();
  }
  std::vector<Kind> kinds{Kind::parameter, Kind::gradient, Kind::momentum, Kind::variance};
  if (GetParam() == at::kBFloat16) {
    kinds.push_back(Kind::master);
  }

  int moving = 0;
  std::array<std::uint64_t, link_count> by_link{};
  for (std::size_t run = 0; run < std::size(combinations) * ways; ++run) {
    const Combination& combination = combinations[run / ways];
    const Way way = way_of(run / ways, run % ways);
    SCOPED_TRACE(std::string(combination.name) + ", " + way.name());
    options.threads = way.threads;
    const TrainingResult& expected = without.at(static_cast<std::size_t>(way.threads - 1))[way.states];
    MemoryUsage before;
    int step = 0;
    std::string stayed;  // the kinds that crossed no link in some step
    const TrainingResult managed =
        train_small_gpt(options, config_for(combination, way, GetParam(), folder_), [&](Session& session) {
          // A deferred update crosses with the step after its own: from the second on, every step sees one.
          const MemoryUsage usage = session.memory_usage();
          for (const Kind kind : kinds) {
            const bool moved = crossed(usage, kind) > crossed(before, kind);
            stayed += moved || step == 0 ? "" : std::string(name_of(kind)) + " ";
          }
          before = usage;
          ++step;
        });
    EXPECT_EQ(managed.losses, expected.losses);
    EXPECT_EQ(managed.norms, expected.norms);
    ASSERT_EQ(managed.parameters.size(), expected.parameters.size());
    for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(managed.parameters[i], expected.parameters[i])) << "parameter " << i;
    }
    for (const Tier tier : all_tiers) {
      EXPECT_LE(before.peak(tier), before.capacity(tier)) << name_of(tier);
      std::uint64_t kinds_sum = 0;
      for (const Kind kind : all_kinds) {
        kinds_sum += before.now(tier, kind);
      }
      EXPECT_EQ(kinds_sum, before.now(tier)) << name_of(tier);
    }
    EXPECT_LT(before.chunk_peak(Tier::device) * 4, parameter_bytes);
    EXPECT_TRUE(stayed.empty() || !combination.everything_crosses) << stayed;
    moving += stayed.empty() ? 1 : 0;
    for (const Link link : all_links) {
      by_link[index_of(link)] += before.moved(link);
    }
  }
  EXPECT_GE(moving, 18);
  for (const Link link : all_links) {
    EXPECT_GT(by_link[index_of(link)], 0u) << name_of(link);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Identity, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& type) { return std::string(c10::toString(type.param)); });

}  // namespace terrace::testing
