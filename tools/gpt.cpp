#include "tools/gpt.h"

#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "integration/block.h"

namespace terrace {
namespace {

namespace nn = torch::nn;
namespace functional = torch::nn::functional;

constexpr double kDeviation = 0.02;          // of weights, and of embeddings of tokens
constexpr double kPositionDeviation = 0.01;  // of embeddings of positions

nn::LayerNorm norm(std::int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

}  // namespace

void GptOptions::validate() const {
  if (width % heads == 0) return;
  throw ConfigError(
      "model.width (" + std::to_string(width) + ") is not a multiple of model.heads (" + std::to_string(heads) + ")",
      "each head has width / heads channels: set model.width to " + std::to_string((width / heads + 1) * heads) +
          ", or change model.heads");
}

GptLinearImpl::GptLinearImpl(std::int64_t inputs, std::int64_t outputs, double deviation)
    : weight_(register_parameter("weight", torch::empty({outputs, inputs}))),
      bias_(register_parameter("bias", torch::zeros({outputs}))) {
  nn::init::normal_(weight_, 0.0, deviation);
}

GptLayerImpl::GptLayerImpl(const GptOptions& options) : heads_(options.heads) {
  const std::int64_t width = options.width;
  // What is added to the residual stream is scaled so that its variance does not grow with the layers.
  const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(options.layers));
  attention_norm_ = register_module("attention_norm", norm(width));
  query_key_value_ = register_module("query_key_value", GptLinear(width, 3 * width, kDeviation));
  projection_ = register_module("projection", GptLinear(width, width, residual));
  mlp_norm_ = register_module("mlp_norm", norm(width));
  expand_ = register_module("expand", GptLinear(width, 4 * width, kDeviation));
  contract_ = register_module("contract", GptLinear(4 * width, width, residual));
}

at::Tensor GptLayerImpl::forward(const at::Tensor& x) {
  const at::Tensor attended = x + attention(attention_norm_(x));
  const at::Tensor hidden = at::gelu(expand_(mlp_norm_(attended)), "tanh");
  return attended + contract_(hidden);
}

at::Tensor GptLayerImpl::attention(const at::Tensor& x) {
  const std::int64_t sequences = x.size(0);
  const std::int64_t tokens = x.size(1);
  const std::int64_t width = x.size(2);
  const at::Tensor qkv = query_key_value_(x).view({sequences, tokens, 3, heads_, width / heads_});
  // Not `select` of each: in backward that makes three times the bytes, most of them zeros, and sums them up.
  const std::vector<at::Tensor> parts = qkv.unbind(2);
  const auto part = [&](std::size_t index) { return parts[index].transpose(1, 2); };  // [B, H, T, W/H]
  const at::Tensor mixed = at::scaled_dot_product_attention(part(0), part(1), part(2), /*attn_mask=*/std::nullopt,
                                                            /*dropout_p=*/0.0, /*is_causal=*/true);
  return projection_(mixed.transpose(1, 2).reshape({sequences, tokens, width}));
}

GptImpl::GptImpl(const GptOptions& options) : options_(options) {
  options.validate();
  embedding_ = register_module("embedding", nn::Embedding(GptOptions::vocabulary, options.width));
  positions_ = register_module("positions", nn::Embedding(options.sequence, options.width));
  layers_ = register_module("layers", nn::ModuleList());
  for (std::int64_t layer = 0; layer < options.layers; ++layer) layers_->push_back(GptLayer(options));
  norm_ = register_module("norm", norm(options.width));
  nn::init::normal_(embedding_->weight, 0.0, kDeviation);
  nn::init::normal_(positions_->weight, 0.0, kPositionDeviation);
}

at::Tensor GptImpl::logits(const at::Tensor& tokens) {
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = embedding_(tokens) + positions_(positions);
  for (const auto& module : *layers_) {
    auto* const layer = module->as<GptLayer>();
    x = block([layer](const at::Tensor& input) { return layer->forward(input); }, std::move(x));
  }
  return torch::linear(norm_(x), embedding_->weight).to(torch::kFloat32);
}

at::Tensor GptImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  return functional::cross_entropy(logits(tokens).view({-1, GptOptions::vocabulary}), targets.view({-1}));
}

std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& model,
                                                                const torch::optim::AdamWOptions& options) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const at::Tensor& parameter : model.parameters()) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  auto undecayed = options;
  undecayed.weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::make_unique<torch::optim::AdamWOptions>(options));
  groups.emplace_back(std::move(others), std::make_unique<torch::optim::AdamWOptions>(undecayed));
  return groups;
}

}  // namespace terrace
