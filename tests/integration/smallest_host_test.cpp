// What a refused host.memory is told to be: it leads to the smallest that trains, in few tries.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/units.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/session_world.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t kib = 1024;
constexpr std::int64_t width = 128;
constexpr int blocks = 3;
constexpr std::uint64_t largest_weight_bytes = 4 * width * width * sizeof(float);
constexpr std::uint64_t bytes_of_model = blocks * (15 * width * width + 10 * width) * sizeof(float);
constexpr std::uint64_t rounding = 60 * kib;  // of all its chunks to whole blocks
constexpr std::uint64_t staging = 64 * kib;
constexpr int steps = 2;

/// Weights of several sizes, of which the larger have chunks of their own.
struct Blocks : torch::nn::Module {
  Blocks() {
    for (int block = 0; block < blocks; ++block) {
      for (const auto& [in, out] :
           {std::pair(width, width), {width, 3 * width}, {3 * width, width}, {width, 4 * width}, {4 * width, width}}) {
        layers.push_back(register_module("layer" + std::to_string(layers.size()), torch::nn::Linear(in, out)));
      }
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

struct Placement {
  std::string name;
  std::string settings;
  std::uint64_t resting = 0;  ///< how many of parameters, gradients and two moments rest on the host
};

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.name; }

const std::vector<Placement> placements{
    {"anywhere", "", 0},
    {"parameters_on_the_host",
     "placement.parameters = { host = 1.0 }\nplacement.gradients = { nvme = 1.0 }\n"
     "placement.optimizer = { nvme = 1.0 }\n",
     1},
    {"gradients_on_the_host",
     "placement.parameters = { nvme = 1.0 }\nplacement.gradients = { host = 1.0 }\n"
     "placement.optimizer = { nvme = 1.0 }\n",
     1},
    {"states_on_the_host",
     "placement.parameters = { nvme = 1.0 }\nplacement.gradients = { nvme = 1.0 }\n"
     "placement.optimizer = { host = 1.0 }\n",
     2},
    {"half_of_the_states_on_the_host", "placement.optimizer = { host = 0.5, nvme = 0.5 }\n", 1},
    {"all_on_the_host",
     "placement.parameters = { host = 1.0 }\nplacement.gradients = { host = 1.0 }\n"
     "placement.optimizer = { host = 1.0 }\n",
     4},
};

/// With NVMe, unless that folder is empty.
Config config_of(const std::string& settings, std::uint64_t host_bytes, const std::filesystem::path& nvme,
                 std::uint64_t nvme_bytes = 64 << 20) {
  std::string text = "placement.chunk = \"64KiB\"\nlog.level = \"off\"\ntimeline.memory = \"16KiB\"\n" + settings;
  if (!nvme.empty()) {
    text += "nvme.paths = [\"" + nvme.string() + "\"]\n";
  }
  Config config = Config::parse(text);
  config.device.memory = 16 << 20;
  config.host.memory = host_bytes;
  if (!nvme.empty()) {
    config.nvme.memory = nvme_bytes;
  }
  return config;
}

template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer) {
  for (int step = 0; step < steps; ++step) {
    model.forward(torch::randn({2, width})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

class SmallestHost : public ::testing::TestWithParam<Placement> {
 protected:
  static bool has_nvme() { return GetParam().resting < 4; }

  /// What host.memory should be at least by the error of training with `host_bytes`; nothing where that trains.
  std::optional<std::uint64_t> told_by_training_with(std::uint64_t host_bytes) const {
    const TemporaryFolder folder;
    const Config config =
        config_of(GetParam().settings, host_bytes, has_nvme() ? folder.path() : std::filesystem::path());
    std::optional<SessionWorld> world;
    try {
      world.emplace(&config);
      Session& session = *world->session;
      const auto model = session.construct([] { return std::make_shared<Blocks>(); });
      session.manage(*model);
      const auto optimizer = world->adamw(*model);
      train(*model, *optimizer);
      session.synchronize();
      return std::nullopt;
    } catch (const OutOfMemory& error) {
      return told_by(error);
    } catch (const c10::Error& error) {
      const auto refused = last_error_as<OutOfMemory>(*world->session);
      EXPECT_TRUE(refused) << error.what();
      return refused ? told_by(*refused) : 0;
    }
  }

 private:
  static std::uint64_t told_by(const OutOfMemory& error) {
    const std::string before = "raise host.memory to at least ";
    const std::string hint = error.hint();
    const std::size_t at = hint.find(before);
    EXPECT_NE(at, std::string::npos) << error.what() << ": " << hint;
    if (at == std::string::npos) {
      return 0;
    }
    const std::string rest = hint.substr(at + before.size());
    return parse_bytes(rest.substr(0, rest.find_first_of(" ,")));
  }
};

TEST_P(SmallestHost, is_found_by_following_the_hints_of_a_few_refusals_and_with_less_nothing_trains) {
  constexpr int most_refusals = 3;
  std::uint64_t host_bytes = (has_nvme() ? 640 : 3200) * kib;  // in which it can be built
  int refusals = 0;
  while (const auto told = told_by_training_with(host_bytes)) {
    ASSERT_GT(*told, host_bytes);
    ASSERT_LE(++refusals, most_refusals) << "told " << format_bytes_exactly(*told);
    host_bytes = *told;
  }
  EXPECT_GT(refusals, 0);
  EXPECT_TRUE(told_by_training_with(host_bytes - page)) << format_bytes_exactly(host_bytes);
  // What does not rest there is there for the update of one chunk at a time.
  const std::uint64_t resting = GetParam().resting;
  EXPECT_LE(host_bytes, resting * (bytes_of_model + rounding) + (4 - resting) * largest_weight_bytes + staging);
}

const std::string parameters_on_host =
    "placement.parameters = { host = 1.0 }\nplacement.gradients = { nvme = 1.0 }\nplacement.optimizer = { nvme = 1.0 "
    "}\n";

TEST(RoomToMoveIn, of_tensors_outside_the_hosts_budget_is_that_of_their_chunks) {
  const TemporaryFolder folder;
  const Config config = config_of(parameters_on_host, bytes_of_model + rounding + staging, folder.path());
  SessionWorld world(&config);
  const auto model = std::make_shared<Blocks>();  // which no session has seen
  for (at::Tensor& parameter : model->parameters()) {
    parameter.requires_grad_(false);
  }
  const at::Tensor x = torch::randn({2, width});
  const at::Tensor expected = model->forward(x);
  world.manage(*model);
  EXPECT_TRUE(torch::equal(model->forward(x), expected));
}

TEST(RoomToMoveIn, of_a_parameter_that_is_trained_from_now_on_is_that_of_its_chunk) {
  const TemporaryFolder folder;
  const Config config =
      config_of(parameters_on_host, bytes_of_model + rounding + 3 * largest_weight_bytes + staging, folder.path());
  SessionWorld world(&config);
  const auto model = world.session->construct([] { return std::make_shared<Blocks>(); });
  at::Tensor& last = model->layers.back()->weight;
  last.requires_grad_(false);
  world.manage(*model);
  const auto optimizer = world.adamw(*model);
  train(*model, *optimizer);
  last.requires_grad_(true);
  train(*model, *optimizer);
  world.session->synchronize();
  EXPECT_EQ(world.session->last_error(), nullptr);
}

TEST(RoomToRest, of_states_that_an_optimizer_does_not_keep_is_there_for_others) {
  const TemporaryFolder folder;
  // Parameters, gradients and momenta; a variance would be too much.
  const std::uint64_t nvme_bytes = 3 * (bytes_of_model + rounding) + staging;
  Config config = config_of("placement.gradients = { nvme = 1.0 }\nplacement.optimizer = { nvme = 1.0 }\n",
                            4 * largest_weight_bytes + staging, folder.path(), nvme_bytes);
  config.device.memory = 1 << 20;
  SessionWorld world(&config);
  const auto model = world.session->construct([] { return std::make_shared<Blocks>(); });
  world.manage(*model);
  SGD optimizer(*world.session, SGD::Options(1e-2).momentum(0.9));
  train(*model, optimizer);
  world.session->synchronize();
  EXPECT_EQ(world.session->last_error(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Of, SmallestHost, ::testing::ValuesIn(placements),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace terrace::testing
