/// A small GPT of plain LibTorch modules, with a tied embedding, and a training loop over it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <terrace/terrace.h>
#include <torch/torch.h>

namespace terrace::testing {

struct SmallGptShape {
  std::int64_t vocabulary = 64;
  std::int64_t width = 64;
  std::int64_t heads = 4;
  std::int64_t layers = 4;
  std::int64_t sequence = 16;
  double dropout = 0;
};

struct SmallLayer : torch::nn::Module {
  explicit SmallLayer(const SmallGptShape& shape)
      : heads(shape.heads),
        dropout(shape.dropout),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})))),
        qkv(register_module("qkv", torch::nn::Linear(shape.width, 3 * shape.width))),
        projection(register_module("projection", torch::nn::Linear(shape.width, shape.width))),
        up(register_module("up", torch::nn::Linear(shape.width, 4 * shape.width))),
        down(register_module("down", torch::nn::Linear(4 * shape.width, shape.width))) {}

  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0);
    const auto length = x.size(1);
    const auto width = x.size(2);
    const auto parts = qkv(norm1(x)).reshape({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + projection(attended.transpose(1, 2).reshape({batch, length, width}));
    x = x + torch::dropout(down(torch::gelu(up(norm2(x)))), dropout, is_training());
    return x;
  }

  std::int64_t heads;
  double dropout;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, up, down;
};

struct SmallGpt : torch::nn::Module {
  explicit SmallGpt(const SmallGptShape& shape)
      : embedding(register_module("embedding", torch::nn::Embedding(shape.vocabulary, shape.width))),
        position(register_module("position", torch::nn::Embedding(shape.sequence, shape.width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})))) {
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<SmallLayer>(shape)));
    }
  }

  /// Mean cross entropy of predicting `targets` from `tokens`, both [batch, sequence].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = embedding(tokens) + position(torch::arange(tokens.size(1), tokens.device()));
    for (const auto& layer : layers) {
      x = terrace::block([layer](at::Tensor input) { return layer->forward(std::move(input)); }, x);
    }
    const at::Tensor logits = torch::linear(norm(x), embedding->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat), targets.flatten());
  }

  torch::nn::Embedding embedding, position;
  torch::nn::LayerNorm norm;
  std::vector<std::shared_ptr<SmallLayer>> layers;
};

/// How to train; what is left of it afterwards.
struct TrainingOptions {
  SmallGptShape shape;
  at::ScalarType type = at::kFloat;
  int steps = 20;
  int micro_batches = 2;
  double max_gradient_norm = 0.5;
  at::Device device = at::kCPU;  ///< where to train without a session
  int threads = 1;               ///< tiny ops: several would only wait for each other
  Config::Optimizer optimizer;   ///< without a session
};

struct TrainingResult {
  std::vector<float> losses;           // one a micro-batch
  std::vector<double> norms;           // one a step
  std::vector<at::Tensor> parameters;  // copies on the CPU, in order
};

/// Trains a SmallGpt without a session where `config` is absent, else managed. `after_step` sees the session.
TrainingResult train_small_gpt(const TrainingOptions& options, const std::optional<Config>& config = std::nullopt,
                               const std::function<void(Session&)>& after_step = {});

/// Whether two tensors have the same type, shape and bits.
bool same_bits(const at::Tensor& left, const at::Tensor& right);
/// Of as many tensors, one by one.
void expect_same_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected);

}  // namespace terrace::testing
