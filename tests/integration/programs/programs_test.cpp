// Any program: each of the table gives the same bits unmanaged, with room for all, with activations on the host, with
// everything at rest on the host and with everything on NVMe, where device memory is so small that chunks must come and
// go.
#include "tests/integration/programs/programs.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/transfer_service.h"
#include "tests/base/temporary_folder.h"

namespace terrace::testing {
namespace {

constexpr std::uint64_t chunk_bytes = 16 << 10;
constexpr std::array chunk_kinds{Kind::parameter, Kind::gradient, Kind::master, Kind::momentum, Kind::variance};

std::vector<Program> all_programs() {
  std::vector<Program> all;
  for (auto* list : {&gradient_programs, &parameter_programs, &module_programs, &sequence_programs,
                     &saved_tensor_programs, &loop_programs}) {
    for (const Program& program : list()) {
      all.push_back(program);
    }
  }
  return all;
}

/// How a run ended.
struct Outcome {
  Recorded recorded;
  std::string error;
  bool out_of_memory = false;
  MemoryUsage usage;
};

bool is_out_of_memory(const std::exception_ptr& error) {
  if (!error) {
    return false;
  }
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory&) {
    return true;
  } catch (...) {
    return false;
  }
}

Outcome run(const Program& program, const std::optional<Config>& config) {
  Outcome result;
  try {
    World world(config);
    try {
      program.run(world);
    } catch (const std::exception& error) {
      result.error = error.what();
      result.out_of_memory = is_out_of_memory(std::current_exception());
    }
    if (Session* session = world.session()) {
      result.out_of_memory = result.out_of_memory || is_out_of_memory(session->last_error());
    }
    result.usage = world.usage();
    result.recorded = world.recorded();
  } catch (const OutOfMemory& error) {  // not even a session fits
    result.error = error.what();
    result.out_of_memory = true;
  }
  return result;
}

Config roomy(const Program& program) {
  Config config;
  config.device.memory = 256 << 20;
  config.host.memory = 256 << 20;
  config.timeline.memory = 0;
  config.placement.chunk = chunk_bytes;
  config.placement.activations = program.recomputes ? "recompute" : "keep";
  config.log.level = LogLevel::off;
  return config;
}

std::uint64_t bytes_in_chunks(const MemoryUsage& usage, Tier tier) {
  std::uint64_t bytes = 0;
  for (const Kind kind : chunk_kinds) {
    bytes += usage.peak(tier, kind);
  }
  return bytes;
}

/// The table's line.
struct Line {
  std::string host, nvme, verdict;
};
std::map<std::string, Line>& lines() {
  static std::map<std::string, Line> all;
  return all;
}

/// Grows the budgets, from less than can be enough, until the program runs within them.
template <class Configure>
Outcome run_within_the_least(const Program& program, Configure&& configure, double& share) {
  for (share = 0.2;; share *= 1.1) {
    Outcome result = run(program, configure(share));
    if (!result.out_of_memory || share > 1) {
      return result;
    }
  }
}

std::string first_difference(const Recorded& left, const Recorded& right) {
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    if (left[i] != right[i]) {
      return "record " + std::to_string(i) + ", " + left[i].first;
    }
  }
  return left.size() == right.size() ? "" : "the number of records";
}

std::string percent(double share) { return std::to_string(static_cast<int>(share * 100)) + "%"; }

}  // namespace

void PrintTo(const Program& program, std::ostream* out) { *out << program.name; }

class Programs : public ::testing::TestWithParam<Program> {};

INSTANTIATE_TEST_SUITE_P(Table, Programs, ::testing::ValuesIn(all_programs()), [](const auto& program) {
  std::string name;
  for (const char letter : std::string(program.param.name)) {
    name += std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  }
  return name;
});

TEST_P(Programs, give_the_same_bits_wherever_bytes_rest) {
  const Program& program = GetParam();
  Line& line = lines()[program.name];
  line.verdict = "DIFFERS";
  const Outcome unmanaged = run(program, std::nullopt);
  const Outcome with_room = run(program, roomy(program));
  Config activations_away = roomy(program);
  if (!program.recomputes) {
    activations_away.placement.activations = "host";
  }
  const Outcome with_activations_away = run(program, activations_away);
  const std::uint64_t in_chunks = with_room.usage.chunk_peak(Tier::device);
  std::uint64_t beside = 0;
  for (const Kind kind : {Kind::activation, Kind::buffer, Kind::other}) {
    beside += with_room.usage.peak(Tier::device, kind);
  }
  const auto tight = [&](double share) {
    Config config = roomy(program);
    config.device.chunks = std::max<std::uint64_t>(static_cast<std::uint64_t>(share * in_chunks), chunk_bytes);
    config.device.memory = *config.device.chunks + beside + beside / 8 + (64 << 10);
    return config;
  };
  double host_share = 0;
  const Outcome on_host = run_within_the_least(program, tight, host_share);
  const TemporaryFolder folder;
  const std::uint64_t state = bytes_in_chunks(with_room.usage, Tier::host);
  double nvme_share = 0;
  const Outcome on_nvme = run_within_the_least(
      program,
      [&](double share) {
        Config config = tight(std::max(share, host_share));
        config.host.memory = static_cast<std::uint64_t>(share * state) + TransferService::staging_blocks * chunk_bytes +
                             with_room.usage.peak(Tier::host, Kind::other) / 2;
        config.nvme.paths = {folder.path()};
        config.nvme.memory = 64 << 20;
        config.placement.parameters = config.placement.gradients = config.placement.optimizer =
            Config::Shares{.nvme = 1};
        return config;
      },
      nvme_share);

  if (program.refused_with != nullptr) {
    for (const Outcome* each : {&with_room, &with_activations_away, &on_host, &on_nvme}) {
      EXPECT_THAT(each->error, ::testing::HasSubstr(program.refused_with));
    }
    line.verdict = HasFailure() ? "NOT REFUSED" : "refused";
    return;
  }
  EXPECT_EQ(unmanaged.error, "");
  EXPECT_FALSE(unmanaged.recorded.empty());
  for (const Outcome* each : {&with_room, &with_activations_away, &on_host, &on_nvme}) {
    EXPECT_EQ(each->error, "");
    EXPECT_EQ(first_difference(unmanaged.recorded, each->recorded), "");
    for (const Tier tier : all_tiers) {
      EXPECT_LE(each->usage.peak(tier), each->usage.capacity(tier)) << name_of(tier);
    }
  }
  // Chunks had to move: less of them was ever there at once, and they came back more often.
  for (const Outcome* each : {&on_host, &on_nvme}) {
    EXPECT_LT(each->usage.chunk_peak(Tier::device), in_chunks);
    if (!program.wants_all) {
      EXPECT_GT(each->usage.moved(Link::host_to_device), with_room.usage.moved(Link::host_to_device));
    }
  }
  EXPECT_GT(on_nvme.usage.moved(Link::nvme_to_host), 0u);
  EXPECT_GT(on_nvme.usage.moved(Link::host_to_nvme), 0u);
  line.host = percent(static_cast<double>(on_host.usage.chunk_peak(Tier::device)) / in_chunks);
  line.nvme = percent(nvme_share);
  line.verdict = HasFailure() ? "DIFFERS" : "identical";
}

TEST_P(Programs, run_in_the_smallest_device_memory_that_they_tell_and_in_no_less) {
  const Program& program = GetParam();
  if (program.refused_with != nullptr) {
    GTEST_SKIP() << "it is refused";
  }
  const Outcome with_room = run(program, roomy(program));
  const auto with = [&](std::uint64_t device_bytes) {
    Config config = roomy(program);
    config.device.memory = device_bytes;
    return run(program, config);
  };
  const std::uint64_t told = with_room.usage.needed(Tier::device);
  const Outcome exactly = with(told);
  EXPECT_EQ(exactly.error, with_room.error);
  EXPECT_EQ(exactly.usage.needed(Tier::device), told);
  EXPECT_EQ(first_difference(with_room.recorded, exactly.recorded), "");
  EXPECT_TRUE(with(told - 1).out_of_memory);
}

// Every item of what is promised, in the words of the promise, and what else ordinary programs do.
TEST(Table, has_a_row_for_every_item_of_the_promise) {
  const std::set<std::string> promised{"clip_grad_norm_",
                                       "zero_grad by optimizer",
                                       "zero_grad by module",
                                       "gradients discarded",
                                       "gradients read",
                                       "gradients edited",
                                       "gradients set by hand",
                                       "accumulation",
                                       "retain_graph",
                                       "create_graph",
                                       "several backward calls",
                                       "tensor hooks",
                                       "user post-accumulate hooks",
                                       "autograd::grad",
                                       "sparse gradients",
                                       "tied",
                                       "frozen",
                                       "unused",
                                       "strided",
                                       "empty",
                                       "scalar",
                                       "several dtypes",
                                       "written in place",
                                       "replaced by set_data",
                                       "replaced by set_data of another shape",
                                       "replaced by .to()",
                                       "replaced by torch::load",
                                       "LoRA",
                                       "parameter groups in one chunk",
                                       "schedulers",
                                       "two optimizers",
                                       "Transformer",
                                       "MultiheadAttention",
                                       "LSTM",
                                       "GRU",
                                       "Conv1d",
                                       "Conv2d",
                                       "Conv3d",
                                       "BatchNorm",
                                       "Embedding with padding index",
                                       "EmbeddingBag",
                                       "mixture of experts",
                                       "packed sequences",
                                       "cells",
                                       "losses",
                                       "spectra",
                                       "custom autograd functions",
                                       "autocast",
                                       "dropout inside block",
                                       "nested blocks",
                                       "blocks with several inputs and outputs",
                                       "ops on tensor lists",
                                       "an in-place change after saving",
                                       "an in-place change after saving, with hooks on",
                                       "an in-place change after saving, inside blocks",
                                       "a graph kept over a step",
                                       "several models",
                                       "modules added later",
                                       "what a model holds after its session",
                                       "optimizer in backward",
                                       "moving averages",
                                       "parameters_to_vector",
                                       "computed weights",
                                       "gradient penalty",
                                       "a module in a loop",
                                       "inference mode",
                                       "torch::save"};
  std::set<std::string> rows;
  for (const Program& program : all_programs()) {
    rows.insert(program.name);
    EXPECT_EQ(program.refused_with != nullptr, std::string(program.name) == "sparse gradients") << program.name;
  }
  EXPECT_EQ(rows, promised);
}

namespace {

/// Prints the table when all that were asked for have run.
class PrintsTable final : public ::testing::Environment {
 public:
  void TearDown() override {
    std::printf("%-48s  %-62s  %11s  %9s  %s\n", "program", "what is unusual about it", "device holds", "host holds",
                "verdict");
    for (const Program& program : all_programs()) {
      if (const auto line = lines().find(program.name); line != lines().end()) {
        std::printf("%-48s  %-62s  %11s  %9s  %s\n", program.name, program.unusual, line->second.host.c_str(),
                    line->second.nvme.c_str(), line->second.verdict.c_str());
      }
    }
  }
};

const ::testing::Environment* const prints_table = ::testing::AddGlobalTestEnvironment(new PrintsTable);

}  // namespace
}  // namespace terrace::testing
