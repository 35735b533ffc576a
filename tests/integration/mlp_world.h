/// An Mlp in a tight session or without a session, for the tests of optimizers.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_mlp.h"

namespace terrace::testing {

using Group = torch::optim::OptimizerParamGroup;

/// Where bf16 parameters have masters, an update brings more to the host.
inline constexpr std::uint64_t host_chunks = 10;

inline AdamW::Options usual() { return AdamW::Options(1e-2).weight_decay(0.1); }

/// A model, with a session or without one.
struct World {
  explicit World(const Config* config = nullptr, at::ScalarType type = at::kFloat, Config::Optimizer unmanaged = {})
      : without_session(std::move(unmanaged)) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (config != nullptr) {
      session.emplace(*config);
    }
    model = std::make_shared<Mlp>();
    model->to(type);
    manage();
  }

  void manage() {
    if (session) {
      session->manage(*model);
    }
  }
  std::unique_ptr<AdamW> adamw(const AdamW::Options& options) { return make<AdamW>(options); }
  std::unique_ptr<AdamW> adamw(const AdamW::Groups& groups, const AdamW::Options& options) {
    return session ? std::make_unique<AdamW>(*session, groups, options)
                   : std::make_unique<AdamW>(groups, options, without_session);
  }
  template <class Kind>
  std::unique_ptr<Kind> make(const typename Kind::Options& options) {
    return session ? std::make_unique<Kind>(*session, options)
                   : std::make_unique<Kind>(model->parameters(), options, without_session);
  }
  /// One step; adds the loss to `results`.
  void train(torch::optim::Optimizer& optimizer, Tensors& results) {
    const at::Tensor loss = model->forward(batch(model->layers[0]->weight.scalar_type()));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    results.push_back(loss.detach().clone());
  }

  std::optional<Session> session;
  const Config::Optimizer without_session;
  std::shared_ptr<Mlp> model;
};

inline void add_parameters(World& world, Tensors& results) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    results.push_back(parameter.detach().clone());
  }
}

/// One of its gradients.
inline void poison(World& world, float value = std::numeric_limits<float>::quiet_NaN()) {
  const torch::NoGradGuard no_grad;
  world.model->layers[3]->weight.mutable_grad()[2][5] = value;
}

/// Runs a program without a session and in one of each configuration, and expects the same bits of all that it
/// returns and of the parameters; the states must have moved where they rest on NVMe.
inline void expect_the_bits_of_unmanaged(const std::function<Tensors(World&)>& program,
                                         at::ScalarType type = at::kFloat, const Config::Optimizer& optimizer = {}) {
  World plain(nullptr, type, optimizer);
  Tensors expected = program(plain);
  add_parameters(plain, expected);
  const TemporaryFolder folder;
  for (Config config : {tight(), tight_on_nvme(folder, host_chunks)}) {
    config.optimizer = optimizer;
    if (type == at::kBFloat16) {
      config.device.chunks = 2 * chunk_bytes;  // a chunk holds two layers
    }
    const bool on_nvme = !config.nvme.paths.empty();
    SCOPED_TRACE(on_nvme ? "all on NVMe" : "all on the host");
    Tensors actual;
    {
      World managed(&config, type);
      actual = program(managed);
      add_parameters(managed, actual);
      const MemoryUsage usage = managed.session->memory_usage();
      EXPECT_GT(usage.moved(Link::host_to_device, Kind::parameter), config.device.chunks.value());
      EXPECT_EQ(usage.moved(Link::nvme_to_host, Kind::momentum) > 0, on_nvme);
      EXPECT_EQ(usage.moved(Link::host_to_nvme, Kind::momentum) > 0, on_nvme);
      EXPECT_EQ(managed.session->last_error(), nullptr);
    }
    expect_same_bits(actual, expected);
  }
}

template <class Call>
void expect_logic_error(const std::string& text, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error about " << text;
  } catch (const LogicError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  }
}

inline void backward(World& world) {
  world.model->forward(batch(world.model->layers[0]->weight.scalar_type())).backward();
}

}  // namespace terrace::testing
