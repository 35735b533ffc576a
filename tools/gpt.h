/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) over bytes, as an ordinary
/// LibTorch module: nothing in it knows of tiers or sessions. Each layer is a `block`.
///
/// Learned positions, layers that normalise before attention and before the MLP, a head tied to the embedding.
/// Shapes: B sequences, T tokens, W width, H heads.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/torch.h>

namespace terrace {

struct GptOptions {
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 256;
  std::int64_t sequence = 256;  ///< most tokens of an input

  static constexpr std::int64_t vocabulary = 256;  ///< bytes

  /// Throws ConfigError unless the heads divide the width.
  void validate() const;
};

/// As nn::Linear, which draws weights that a GPT would draw anew, and adds the bias in an op of its own where the input
/// has more than two dimensions.
class GptLinearImpl : public torch::nn::Module {
 public:
  /// Weights of that standard deviation, from LibTorch's default generator.
  GptLinearImpl(std::int64_t inputs, std::int64_t outputs, double deviation);
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight_, bias_); }  // [..., inputs] -> [..., outputs]

 private:
  at::Tensor weight_;
  at::Tensor bias_;
};
TORCH_MODULE(GptLinear);

class GptLayerImpl : public torch::nn::Module {
 public:
  explicit GptLayerImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [B, T, W] -> [B, T, W]

 private:
  at::Tensor attention(const at::Tensor& x);  // causal

  std::int64_t heads_;
  torch::nn::LayerNorm attention_norm_{nullptr};
  GptLinear query_key_value_{nullptr};
  GptLinear projection_{nullptr};
  torch::nn::LayerNorm mlp_norm_{nullptr};
  GptLinear expand_{nullptr};
  GptLinear contract_{nullptr};
};
TORCH_MODULE(GptLayer);

class GptImpl : public torch::nn::Module {
 public:
  /// Weights come from LibTorch's default generator. Throws ConfigError as `validate` does.
  explicit GptImpl(const GptOptions& options);

  /// The mean cross entropy in nats, computed in fp32: [B, T], [B, T] -> [].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  /// [B, T] -> [B, T, 256], fp32.
  at::Tensor logits(const at::Tensor& tokens);

  const GptOptions& options() const noexcept { return options_; }

 private:
  GptOptions options_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::Embedding positions_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Gpt);

/// Two groups, so that matrices decay, and biases and norms do not.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& model,
                                                                const torch::optim::AdamWOptions& options);

}  // namespace terrace
