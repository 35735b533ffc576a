/// What the tests of sessions that save and load build on: a model in training whose state is of every sort, and where
/// its bytes may rest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "integration/checkpoint_reader.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {

using Tensors = std::vector<at::Tensor>;
using Losses = std::vector<float>;

/// Has buffers, a tied parameter and one that is frozen, and draws from the generator.
struct Net : torch::nn::Module {
  static constexpr std::int64_t width = 60;

  explicit Net(std::int64_t inner = width)
      : up(register_module("up", torch::nn::Linear(width, inner))),
        norm(register_module("norm", torch::nn::BatchNorm1d(inner))),
        down(register_module("down", torch::nn::Linear(inner, width))),
        dropout(register_module("dropout", torch::nn::Dropout(0.2))) {
    register_parameter("tied", up->weight);
    scale = register_parameter("scale", torch::full({inner}, 0.5), /*requires_grad=*/false);
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = down(dropout(torch::relu(norm(up(x)) * scale)));
    return (y + torch::linear(x, up->weight).mean()).pow(2).mean();
  }

  torch::nn::Linear up;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear down;
  torch::nn::Dropout dropout;
  at::Tensor scale;
};

inline Config on_host(std::uint64_t chunk_bytes = 16 << 10) {
  Config config;
  config.device.memory = 4 << 20;
  config.host.memory = 4 << 20;
  config.placement.chunk = chunk_bytes;
  config.log.level = LogLevel::error;
  return config;
}

/// Everything at rest on NVMe, and a host that holds little more than one update.
inline Config on_nvme(const TemporaryFolder& folder) {
  Config config = on_host();
  config.device.chunks = 3 * (16 << 10);
  config.host.memory = 10 * (16 << 10);
  config.timeline.memory = 0;
  config.nvme.paths = {folder.path()};
  config.nvme.memory = 4 << 20;
  const Config::Shares shares{.device = 0, .host = 0, .nvme = 1};
  config.placement.parameters = config.placement.gradients = config.placement.optimizer = shares;
  return config;
}

inline Config on_device() {
  Config config = on_host(64 << 10);
  const Config::Shares shares{.device = 1, .host = 0, .nvme = 0};
  config.placement.parameters = config.placement.gradients = shares;
  return config;
}

/// A session with a model in training.
struct CheckpointWorld {
  explicit CheckpointWorld(const Config& config, at::ScalarType type = at::kFloat, std::uint64_t seed = 5,
                           std::int64_t inner = Net::width)
      : session(config), model(std::make_shared<Net>(inner)) {
    at::set_num_threads(1);
    torch::manual_seed(seed);
    for (at::Tensor& parameter : model->parameters()) {
      const at::NoGradGuard no_grad;
      parameter.uniform_(-0.3, 0.3);
    }
    model->to(type);
    session.manage(*model);
  }

  void make_optimizer() {
    optimizer = std::make_unique<AdamW>(session, AdamW::Options(1e-2).weight_decay(0.1));
    optimizer->max_gradient_norm(0.5);
  }

  Losses train(int steps) {
    if (!optimizer) make_optimizer();
    Losses losses;
    for (int i = 0; i < steps; ++i) {
      const at::Tensor loss = model->forward(torch::randn({8, Net::width}).to(model->scale.scalar_type()));
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.item<float>());
    }
    return losses;
  }

  Tensors copies() const {
    const at::NoGradGuard no_grad;
    Tensors all;
    for (const at::Tensor& tensor : model->parameters()) all.push_back(tensor.clone());
    for (const at::Tensor& tensor : model->buffers()) all.push_back(tensor.clone());
    return all;
  }

  Session session;
  std::shared_ptr<Net> model;
  std::unique_ptr<AdamW> optimizer;
};

inline CheckpointManifest manifest_in(const std::filesystem::path& folder) {
  return CheckpointReader(checkpoint_files(), folder).manifest();
}

inline std::filesystem::path data_file_in(const std::filesystem::path& folder) {
  return folder / manifest_in(folder).data_file;
}

class CheckpointSession : public ::testing::Test {
 protected:
  ~CheckpointSession() override { replace_checkpoint_files(nullptr); }

  /// Saves a model after three steps, and says what three more would have given.
  void save_after_three_steps(const Config& config, at::ScalarType type = at::kFloat) {
    CheckpointWorld world(config, type);
    world.train(3);
    world.session.save(folder, {{"step", "3"}});
    later_losses = world.train(3);
    later_copies = world.copies();
  }

  TemporaryFolder scratch;
  TemporaryFolder nvme;
  std::filesystem::path folder = scratch.path() / "checkpoint";
  Losses later_losses;
  Tensors later_copies;
};

}  // namespace terrace::testing
