/// What the tests of a session build on: a program in a tight session, or without one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_mlp.h"

namespace terrace::testing {

/// What a program runs in: with a session, or without one.
struct SessionWorld {
  explicit SessionWorld(const Config* config = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (config != nullptr) {
      host_holds_models = config->nvme.paths.empty();
      session.emplace(*config);
    }
  }

  /// Under `construct`, where the host has room for a model.
  template <class Make>
  auto make(Make&& make_it) {
    return session && host_holds_models ? session->construct(make_it) : make_it();
  }

  template <class Model, class... Arguments>
  std::shared_ptr<Model> build(Arguments... arguments) {
    auto model = make([&] { return std::make_shared<Model>(arguments...); });
    manage(*model);
    return model;
  }

  void manage(torch::nn::Module& module) {
    if (session) {
      session->manage(module);
    }
  }

  std::unique_ptr<AdamW> adamw(const torch::nn::Module& module) {
    const AdamW::Options options = AdamW::Options(1e-2).weight_decay(0.1);
    return session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(module.parameters(), options);
  }

  bool host_holds_models = false;
  std::optional<Session> session;
};

/// Trains and adds each loss to `results`.
template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int steps, Tensors& results) {
  for (int i = 0; i < steps; ++i) {
    const at::Tensor loss = model.forward(batch());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    results.push_back(loss.detach().clone());
  }
}

inline void add_copies(const torch::nn::Module& module, Tensors& results) {
  for (const at::Tensor& tensor : module.parameters()) {
    results.push_back(tensor.detach().clone());
  }
  for (const at::Tensor& tensor : module.buffers()) {
    results.push_back(tensor.detach().clone());
  }
}

inline void expect_kinds_sum_and_peaks_within_budget(const MemoryUsage& usage) {
  for (const Tier tier : all_tiers) {
    std::uint64_t sum = 0;
    for (const Kind kind : all_kinds) {
      sum += usage.now(tier, kind);
    }
    EXPECT_EQ(sum, usage.now(tier)) << name_of(tier);
    EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
  }
}

/// Runs a program without a session and in one of each configuration, and expects the same bits of all that it
/// returns; the parameters must have moved to the device more than once.
inline void expect_the_bits_of_unmanaged(const std::function<Tensors(SessionWorld&)>& program) {
  SessionWorld plain;
  const Tensors expected = program(plain);
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    SCOPED_TRACE(config.nvme.paths.empty() ? "all on the host" : "all on NVMe");
    Tensors actual;
    {
      SessionWorld managed(&config);
      actual = program(managed);
      const MemoryUsage usage = managed.session->memory_usage();
      expect_kinds_sum_and_peaks_within_budget(usage);
      EXPECT_GT(usage.moved(Link::host_to_device, Kind::parameter), 2 * config.device.chunks.value());
      EXPECT_EQ(usage.moved(Link::nvme_to_host, Kind::parameter) > 0, !config.nvme.paths.empty());
      EXPECT_EQ(managed.session->last_error(), nullptr);
    }
    expect_same_bits(actual, expected);
  }
}

/// Reads every parameter, so that those read first have to leave the device.
inline void read_all(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    parameter.detach().sum();
  }
}

template <class Touch>
void expect_refusal_naming(const std::string& name, Touch&& touch) {
  try {
    touch();
    ADD_FAILURE() << "the bytes of " << name << " could be touched";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'" + name + "'"));
  }
}

/// Has buffers.
struct Normalized : torch::nn::Module {
  Normalized() {
    for (int i = 0; i < 4; ++i) {
      const std::string number = std::to_string(i);
      layers.push_back(register_module("layer" + number, torch::nn::Linear(width, width)));
      norms.push_back(register_module("norm" + number, torch::nn::BatchNorm1d(width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = torch::tanh(norms[i](layers[i](x)));
    }
    return x.pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<torch::nn::BatchNorm1d> norms;
};

}  // namespace terrace::testing
