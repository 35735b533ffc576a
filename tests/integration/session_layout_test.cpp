// How a session lays parameters out: in chunks of the size that wastes least, and by the order of use once that is
// known.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "integration/pause.h"
#include "integration/rates.h"
#include "tests/base/environment_variable.h"
#include "tests/integration/session_world.h"

namespace terrace::testing {
namespace {

constexpr int layer_count = 18;
constexpr std::int64_t narrow = 32;  // three layers fill a chunk

struct Layers : torch::nn::Module {
  explicit Layers(int count = layer_count, int steps_of = 1) : stride(steps_of) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(narrow, narrow)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = torch::tanh(layers[i * static_cast<std::size_t>(stride) % layers.size()](x));
    }
    return x.pow(2).mean();
  }
  const int stride;  ///< it uses them by steps of so many
  std::vector<torch::nn::Linear> layers;
};

/// Nothing of other runs, and what these keep.
class PlacementByDefault : public ::testing::Test {
 protected:
  struct Run {
    Tensors results;
    MemoryUsage usage;
  };

  /// Three steps of a new program, in a session if there is a configuration.
  static Run run(const Config* config, int backwards = 1, double max_norm = 0) {
    SessionWorld world(config);
    return run(world, world.build<Layers>(), backwards, max_norm);
  }

  static Run run(SessionWorld& world, const std::shared_ptr<Layers>& model, int backwards, double max_norm,
                 std::int64_t batch = 8) {
    const auto optimizer = world.adamw(*model);
    optimizer->max_gradient_norm(max_norm);
    Run made;
    for (int i = 0; i < 3; ++i) {
      for (int backward = 0; backward < backwards; ++backward) {
        const at::Tensor loss = model->forward(torch::randn({batch, narrow}));
        loss.backward();
        made.results.push_back(loss.detach().clone());
      }
      optimizer->step();
      optimizer->zero_grad();
    }
    if (world.session) {
      world.session->synchronize();
      made.usage = world.session->memory_usage();
      world.session->for_each_parameter(
          [&](const std::string&, at::Tensor& parameter) {
            const Pause pause;  // the device has no room for all of them
            made.results.push_back(parameter.detach().clone());
          },
          Access::read);
    } else {
      add_copies(*model, made.results);
    }
    return made;
  }

  std::size_t kept_notes() const {
    const std::filesystem::path folder = cache_.path() / "terrace" / "models";
    if (!std::filesystem::exists(folder)) return 0;
    const std::filesystem::directory_iterator files(folder);
    return static_cast<std::size_t>(std::distance(begin(files), end(files)));
  }

  /// Parameters and two moments have room on the host, and of gradients a few chunks.
  Config two_thirds_on_the_host() const {
    constexpr std::uint64_t kind_bytes = layer_count / 3 * chunk_bytes;
    Config config = tight_on_nvme(drive_);
    config.placement.parameters = config.placement.gradients = config.placement.optimizer = std::nullopt;
    config.host.memory = 3 * kind_bytes + 6 * chunk_bytes;
    return config;
  }

  static bool rests_on_nvme(const Run& made, Kind kind) { return made.usage.now(Tier::nvme, kind) > 0; }

  /// Layers whose chunks do not all fit the device, and that are not used in the order in which they are made.
  static Run run_out_of_order(const Config* config, std::int64_t batch = 8) {
    SessionWorld world(config);
    return run(world, world.build<Layers>(72, 7), 1, 0, batch);
  }

  /// Of 48 chunks the device has room for 14, less what the program computes with.
  static Config fourteen_chunks() {
    Config config = tight();
    config.device.chunks.reset();
    config.device.memory = 14 * chunk_bytes;
    return config;
  }

  TemporaryFolder drive_;
  TemporaryFolder cache_;
  EnvironmentVariable variable_{"XDG_CACHE_HOME", cache_.path().c_str()};
};

TEST_F(PlacementByDefault, gradients_that_are_read_once_rest_on_nvme_before_the_moments_do_from_the_next_run_on) {
  const Config config = two_thirds_on_the_host();
  const Run plain = run(nullptr);
  const Run first = run(&config);
  expect_same_bits(first.results, plain.results);
  EXPECT_FALSE(rests_on_nvme(first, Kind::gradient)) << "nothing is known of it yet";
  EXPECT_TRUE(rests_on_nvme(first, Kind::momentum) || rests_on_nvme(first, Kind::variance));
  EXPECT_EQ(kept_notes(), 1u);
  const Run second = run(&config);
  expect_same_bits(second.results, plain.results);
  EXPECT_TRUE(rests_on_nvme(second, Kind::gradient));
  EXPECT_FALSE(rests_on_nvme(second, Kind::momentum) || rests_on_nvme(second, Kind::variance));
  EXPECT_FALSE(rests_on_nvme(second, Kind::parameter));
}

TEST_F(PlacementByDefault, gradients_that_are_clipped_rest_on_nvme_as_others_do) {
  const Config config = two_thirds_on_the_host();
  constexpr double max_norm = 0.5;
  const Run plain = run(nullptr, 1, max_norm);
  run(&config, 1, max_norm);
  const Run second = run(&config, 1, max_norm);
  expect_same_bits(second.results, plain.results);
  EXPECT_TRUE(rests_on_nvme(second, Kind::gradient));
  EXPECT_FALSE(rests_on_nvme(second, Kind::momentum) || rests_on_nvme(second, Kind::variance));
}

TEST_F(PlacementByDefault, gradients_that_are_added_to_stay_on_the_host) {
  const Config config = two_thirds_on_the_host();
  for (int again = 0; again < 2; ++again) {
    EXPECT_FALSE(rests_on_nvme(run(&config, 2), Kind::gradient));
  }
  run(&config);     // learns that they are read once
  run(&config, 2);  // and that they are not
  EXPECT_FALSE(rests_on_nvme(run(&config, 2), Kind::gradient));
}

TEST_F(PlacementByDefault, gradients_make_as_much_way_as_backward_hides_on_a_drive_whose_rates_are_known) {
  const Config config = two_thirds_on_the_host();
  // What is lacking would be written in 0.1 s: within forward, but not within backward.
  Rates rates;
  rates.paths[path_key(config.nvme.paths.front())] = {.read = 1e9,
                                                      .write = 10.0 * layer_count / 3 * chunk_bytes,
                                                      .engine = "threads",
                                                      .block_bytes = 4096,
                                                      .depth = 8,
                                                      .direct = true,
                                                      .measured_at = time_now()};
  RatesFile().save(rates);
  run(&config);
  for (const auto& notes : std::filesystem::directory_iterator(cache_.path() / "terrace" / "models")) {
    auto kept = nlohmann::json::parse(std::ifstream(notes.path()));
    kept["forward_seconds"] = 0.3;
    kept["backward_seconds"] = 0.05;
    std::ofstream(notes.path()) << kept;
  }
  const Run made = run(&config);
  EXPECT_TRUE(rests_on_nvme(made, Kind::gradient));
  EXPECT_TRUE(rests_on_nvme(made, Kind::momentum) || rests_on_nvme(made, Kind::variance));
}

TEST_F(PlacementByDefault, gradients_make_no_way_for_moments_that_fit_or_that_there_are_not) {
  Config config = two_thirds_on_the_host();
  run(&config);
  config.host.memory = 4 << 20;
  EXPECT_FALSE(rests_on_nvme(run(&config), Kind::gradient));
  config = two_thirds_on_the_host();
  SessionWorld world(&config);
  auto model = world.build<Layers>();
  torch::optim::SGDOptions options(1e-2);
  const SGD optimizer(*world.session, options.momentum(0.9));  // one moment
  EXPECT_EQ(world.session->memory_usage().now(Tier::nvme, Kind::gradient), 0u);
}

TEST_F(PlacementByDefault, gradients_that_hold_something_stay_where_they_are) {
  const Config config = two_thirds_on_the_host();
  run(&config);
  SessionWorld world(&config);
  auto model = world.build<Layers>();
  model->forward(torch::randn({8, narrow})).backward();
  const auto optimizer = world.adamw(*model);
  EXPECT_EQ(world.session->memory_usage().now(Tier::nvme, Kind::gradient), 0u);
  optimizer->step();
}

TEST_F(PlacementByDefault, parameters_share_chunks_in_the_order_of_their_first_use_from_the_next_run_on) {
  const Config config = fourteen_chunks();
  const Run plain = run_out_of_order(nullptr);
  const Run first = run_out_of_order(&config);
  expect_same_bits(first.results, plain.results);
  EXPECT_FALSE(first.usage.laid_out_by_use) << "nothing is known of it yet";
  EXPECT_EQ(kept_notes(), 1u);
  for (int again = 0; again < 3; ++again) {
    const Run next = run_out_of_order(&config);
    expect_same_bits(next.results, plain.results);
    EXPECT_TRUE(next.usage.laid_out_by_use);
    EXPECT_LT(next.usage.moved(Link::host_to_device) * 2, first.usage.moved(Link::host_to_device));
  }
}

TEST_F(PlacementByDefault, the_order_of_use_is_followed_only_where_the_device_has_room_for_any) {
  const Config roomy = fourteen_chunks();
  const std::uint64_t needed = run_out_of_order(&roomy).usage.needed(Tier::device);
  Config config = roomy;
  config.device.memory = needed;
  const Run by_construction = run_out_of_order(&config);
  EXPECT_FALSE(by_construction.usage.laid_out_by_use);
  EXPECT_EQ(by_construction.usage.needed(Tier::device), needed) << "what worked before works";
  EXPECT_TRUE(run_out_of_order(&roomy).usage.laid_out_by_use);
}

TEST_F(PlacementByDefault, an_order_of_use_with_which_memory_was_refused_is_not_taken_again) {
  Config config = fourteen_chunks();
  config.device.memory = 64 << 20;
  config.placement.order = "construction";
  const std::uint64_t needed = run_out_of_order(&config, 256).usage.needed(Tier::device);
  config.placement.order = "auto";
  run_out_of_order(&config);  // small batches are all that is known
  config.device.memory = needed - 1;
  EXPECT_ANY_THROW(run_out_of_order(&config, 256)) << "in whatever order";
  config.device.memory = needed;
  const Run made = run_out_of_order(&config, 256);
  EXPECT_FALSE(made.usage.laid_out_by_use);
  config.device.memory = 64 << 20;
  EXPECT_TRUE(run_out_of_order(&config, 256).usage.laid_out_by_use) << "there is room for any order";
}

TEST_F(PlacementByDefault, the_order_is_the_one_that_is_asked_for) {
  Config config = fourteen_chunks();
  config.placement.order = "use";
  EXPECT_FALSE(run_out_of_order(&config).usage.laid_out_by_use) << "nobody knows it";
  const std::uint64_t needed = run_out_of_order(&config).usage.needed(Tier::device);
  config.device.memory = needed;
  const Run tight_by_use = run_out_of_order(&config);
  EXPECT_TRUE(tight_by_use.usage.laid_out_by_use);
  EXPECT_EQ(tight_by_use.usage.needed(Tier::device), needed) << "the budget that was told holds for this order";
  config = fourteen_chunks();
  config.placement.order = "construction";
  EXPECT_FALSE(run_out_of_order(&config).usage.laid_out_by_use);
}

TEST_F(PlacementByDefault, no_order_is_kept_of_a_model_that_is_used_as_it_is_made) {
  const Config config = fourteen_chunks();
  run(&config);
  EXPECT_EQ(kept_notes(), 0u);
}

/// Two layers have large chunks, and with all others together less room than one of those takes.
struct LargeAndSmall : torch::nn::Module {
  LargeAndSmall() {
    table = register_parameter("table", torch::randn({width, width}));
    for (const std::int64_t hidden : {4096, 32, 48, 64}) {
      const std::string name = std::to_string(hidden);
      layers.push_back(register_module("up" + name, torch::nn::Linear(width, hidden)));
      layers.push_back(register_module("down" + name, torch::nn::Linear(hidden, width)));
    }
    layers.push_back(register_module("head", torch::nn::Linear(width, width)));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = torch::matmul(input, table);
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.pow(2).mean();
  }
  at::Tensor table;
  std::vector<torch::nn::Linear> layers;
};

TEST_F(PlacementByDefault, gradients_go_back_where_states_do_not_fit_beside_them) {
  // With NVMe full to the last chunk, small gradients there take the room of a large state.
  int fits = 0;
  for (const std::uint64_t host_kib : {4700, 4796, 4892, 4988}) {
    for (const std::uint64_t nvme_kib : {7700, 7750, 7800, 7850, 7900}) {
      std::filesystem::remove_all(cache_.path() / "terrace");
      Config config = two_thirds_on_the_host();
      config.device.memory = 2600 << 10;
      config.device.chunks.reset();
      config.placement.chunk = 32 << 10;
      config.io.block = 16 << 10;
      config.host.memory = host_kib << 10;
      config.nvme.memory = nvme_kib << 10;
      const auto trains = [&] {
        Session session(config);
        try {
          auto model = session.construct([] { return std::make_shared<LargeAndSmall>(); });
          session.manage(*model);
          AdamW optimizer(session, AdamW::Options(1e-2));
          model->forward(torch::randn({2, width})).backward();
          optimizer.step();
          session.synchronize();
          return true;
        } catch (const OutOfMemory&) {
          return false;
        }
      };
      const bool usually = trains();
      fits += usually ? 1 : 0;
      EXPECT_EQ(trains(), usually) << host_kib << " KiB of host, " << nvme_kib << " of NVMe";
    }
  }
  EXPECT_GT(fits, 0);
}

TEST(ChunkSize, is_searched_for_least_waste_unless_it_is_given) {
  // In chunks of 256 KiB seven of these weights take 252 KiB; with fewer in each, no block is begun in vain.
  struct Wide : torch::nn::Module {
    Wide() {
      for (int i = 0; i < 40; ++i) {
        layers.push_back(register_module("layer" + std::to_string(i),
                                         torch::nn::Linear(torch::nn::LinearOptions(96, 96).bias(false))));
      }
    }
    std::vector<torch::nn::Linear> layers;
  };
  const auto usage = [](const Config& config) {
    Session session(config);
    auto model = session.construct([] { return std::make_shared<Wide>(); });
    session.manage(*model);
    return session.memory_usage();
  };
  Config config = tight();
  config.device.chunks.reset();
  config.host.memory = 12 << 20;
  config.placement.chunk = 256 << 10;
  const MemoryUsage given = usage(config);
  EXPECT_EQ(given.chunk_bytes, 256u << 10);
  config.placement.chunk.reset();
  const MemoryUsage found = usage(config);
  EXPECT_LT(found.chunk_bytes, given.chunk_bytes);
  EXPECT_LT(found.chunk_wasted_bytes, given.chunk_wasted_bytes);
  config.placement.chunk = found.chunk_bytes;
  config.io.block = found.block_bytes;
  const MemoryUsage again = usage(config);
  EXPECT_EQ(again.chunk_bytes, found.chunk_bytes);
  EXPECT_EQ(again.chunk_room_bytes, found.chunk_room_bytes);
  EXPECT_EQ(again.chunk_wasted_bytes, found.chunk_wasted_bytes);
}

TEST(ChunkSize, what_chunks_take_beyond_what_they_hold_is_told) {
  Config config = tight();
  Session session(config);
  auto model = session.construct([] { return std::make_shared<Mlp>(); });
  session.manage(*model);
  std::uint64_t bytes = 0;
  for (const at::Tensor& parameter : model->parameters()) bytes += parameter.nbytes();
  const MemoryUsage before = session.memory_usage();
  EXPECT_EQ(before.chunk_room_bytes - before.chunk_wasted_bytes, 2 * bytes) << "parameters and gradients";
  const AdamW optimizer(session, AdamW::Options(1e-3));
  const MemoryUsage after = session.memory_usage();
  EXPECT_EQ(after.chunk_room_bytes - after.chunk_wasted_bytes, 4 * bytes) << "and two moments";
}

}  // namespace
}  // namespace terrace::testing
