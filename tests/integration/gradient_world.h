/// What the tests of gradients build on: a model and its optimizer, in a tight session or without one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_mlp.h"

namespace terrace::testing {

/// A model and its optimizer, with a session or without one.
struct GradientWorld {
  explicit GradientWorld(const Config* config = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (config != nullptr) {
      session.emplace(*config);
    }
    model = std::make_shared<Mlp>();
    if (session) {
      session->manage(*model);
    }
    const AdamW::Options options = AdamW::Options(1e-2).weight_decay(0.1);
    optimizer =
        session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(model->parameters(), options);
  }

  at::Tensor& weight(std::size_t layer) { return model->layers[layer]->weight; }
  at::Tensor& bias(std::size_t layer) { return model->layers[layer]->bias; }
  void backward() { model->forward(batch()).backward(); }
  void step() {
    optimizer->step();
    optimizer->zero_grad();
  }

  std::optional<Session> session;
  std::shared_ptr<Mlp> model;
  std::unique_ptr<AdamW> optimizer;
};

inline void add_parameters(GradientWorld& world, Tensors& results) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    results.push_back(parameter.detach().clone());
  }
}

/// Undefined ones as an empty tensor, so that which are defined is compared too.
inline void add_gradients(GradientWorld& world, Tensors& results) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    results.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : at::Tensor(torch::empty({0})));
  }
}

/// Runs a program without a session and in one of each configuration, and expects the same bits of all that it
/// returns and of the parameters; gradients must have moved.
inline void expect_the_bits_of_unmanaged(const std::function<Tensors(GradientWorld&)>& program) {
  GradientWorld plain;
  Tensors expected = program(plain);
  add_parameters(plain, expected);
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    SCOPED_TRACE(config.nvme.paths.empty() ? "all on the host" : "all on NVMe");
    Tensors actual;
    {
      GradientWorld managed(&config);
      actual = program(managed);
      add_parameters(managed, actual);
      const MemoryUsage usage = managed.session->memory_usage();
      EXPECT_GT(usage.moved(Link::device_to_host, Kind::gradient), 0u);
      EXPECT_EQ(usage.moved(Link::host_to_nvme, Kind::gradient) > 0, !config.nvme.paths.empty());
      EXPECT_EQ(managed.session->last_error(), nullptr);
    }
    expect_same_bits(actual, expected);
  }
}

/// Reads every parameter, so that what was on the device before has to leave.
inline void read_all(GradientWorld& world) {
  for (const at::Tensor& parameter : world.model->parameters()) {
    parameter.detach().sum();
  }
}

inline std::uint64_t gradient_bytes_moved(GradientWorld& world) {
  std::uint64_t bytes = 0;
  for (const Link link : all_links) {
    bytes += world.session->memory_usage().moved(link, Kind::gradient);
  }
  return bytes;
}

}  // namespace terrace::testing
