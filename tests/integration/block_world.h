/// What the tests of blocks build on: a program without a session, or in one that keeps or recomputes activations.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/integration/small_gpt.h"

namespace terrace::testing {

using Tensors = std::vector<at::Tensor>;

inline Config planned(const char* activations) {
  Config config;
  config.device.memory = 16 << 20;
  config.device.chunks = 1 << 20;
  config.host.memory = 16 << 20;
  config.placement.chunk = 16 << 10;
  config.placement.activations = activations;
  config.log.level = LogLevel::error;
  return config;
}

/// What a program that uses blocks runs in: no session, or one that keeps or recomputes activations.
class BlockWorld {
 public:
  static constexpr std::int64_t width = 16;

  explicit BlockWorld(const char* activations = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (activations != nullptr) {
      session_.emplace(planned(activations));
    }
  }

  torch::nn::Linear linear(std::int64_t in = width, std::int64_t out = width) {
    torch::nn::Linear made(in, out);
    manage(*made);
    return made;
  }
  void manage(torch::nn::Module& module) {
    if (session_) {
      session_->manage(module);
    }
  }
  std::optional<Session>& session() { return session_; }

  /// Runs of blocks' functions, where they count them.
  int runs = 0;

 private:
  std::optional<Session> session_;
};

inline at::Tensor input(std::int64_t rows = 4) { return torch::randn({rows, BlockWorld::width}).requires_grad_(); }

}  // namespace terrace::testing
