/// A model of linear layers, for tests that need one whose chunks are easy to count.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace terrace::testing {

/// A layer of the usual width fills a chunk of 16 KiB with its weight and bias.
struct Mlp : torch::nn::Module {
  static constexpr std::int64_t usual_width = 60;

  explicit Mlp(int depth = 6, std::int64_t width = usual_width) {
    for (int i = 0; i < depth; ++i) {
      add(width);
    }
  }
  void add(std::int64_t width = usual_width) {
    layers.push_back(register_module("layer" + std::to_string(layers.size()), torch::nn::Linear(width, width)));
  }
  at::Tensor features(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x;
  }
  /// A loss.
  at::Tensor forward(const at::Tensor& x) { return features(x).pow(2).mean(); }

  std::vector<torch::nn::Linear> layers;
};

}  // namespace terrace::testing
