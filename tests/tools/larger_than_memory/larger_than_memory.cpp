// Trains a torch::nn model for three steps, unmanaged or in a session with what the command line sets, and prints
// what shows whether the two are the same: the losses, a hash of each parameter, and what the process held at most.
//
//     larger_than_memory LAYERS WIDTH unmanaged
//     larger_than_memory LAYERS WIDTH KEY=VALUE...

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>
#include <xxhash.h>

#include <torch/torch.h>

#include "terrace/terrace.h"

namespace {

struct ModelImpl : torch::nn::Module {
  ModelImpl(std::int64_t layers, std::int64_t width)
      : embedding(register_module("embedding", torch::nn::Embedding(256, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::BatchNorm1d(width))),
        head(register_module("head", torch::nn::Linear(width, 256))) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks->push_back(torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(width, 8).dim_feedforward(4 * width)));
    }
    // As many programs do, after torch::nn's own initialisation: out of place, by a list, and beside other tensors.
    const torch::NoGradGuard no_gradients;
    for (auto& parameter : parameters()) {
      if (parameter.dim() == 2) {
        parameter.copy_(parameter * 0.5 + torch::randn_like(parameter) * 0.01);
      }
    }
    scale = register_buffer("scale", torch::randn({width, width}).abs().mean().reshape({1}));
  }

  torch::Tensor forward(torch::Tensor tokens) {
    torch::Tensor hidden = embedding->forward(tokens);
    for (const auto& block : *blocks) {
      hidden = block->as<torch::nn::TransformerEncoderLayer>()->forward(hidden);
    }
    hidden = norm->forward(hidden.transpose(1, 2)).transpose(1, 2);
    return head->forward(hidden * scale);
  }

  torch::nn::Embedding embedding;
  torch::nn::ModuleList blocks;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear head;
  torch::Tensor scale;
};
TORCH_MODULE(Model);

/// The most that the process has held, in bytes.
std::uint64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      std::uint64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

void print_hash(const std::string& name, const at::Tensor& tensor) {
  std::printf("%s %016llx\n", name.c_str(),
              static_cast<unsigned long long>(XXH3_64bits(tensor.const_data_ptr(), tensor.nbytes())));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: larger_than_memory LAYERS WIDTH unmanaged|KEY=VALUE...\n");
    return 2;
  }
  try {
    const std::vector<std::string> settings(argv + 3, argv + argc);
    std::optional<terrace::Session> session;
    if (settings.front() != "unmanaged") {
      session.emplace(terrace::Config::parse("", "command line", settings));
    }
    torch::manual_seed(7);
    const auto build = [&] { return Model(std::stoll(argv[1]), std::stoll(argv[2])); };
    Model model = session ? session->construct(build) : build();
    std::printf("constructed-peak %llu\n", static_cast<unsigned long long>(peak_resident_bytes()));
    std::optional<terrace::AdamW> optimizer;
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
    if (session) {
      session->manage(*model);
      optimizer.emplace(*session, options);
    } else {
      optimizer.emplace(model->parameters(), options);
    }
    optimizer->max_gradient_norm(1.0);
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor tokens = torch::randint(256, {8, 2});
      const torch::Tensor loss =
          torch::cross_entropy_loss(model->forward(tokens).reshape({-1, 256}), tokens.reshape({-1}));
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      std::printf("loss %a\n", loss.item<double>());
    }
    std::int64_t count = 0;
    for (const at::Tensor& parameter : model->parameters()) {
      count += parameter.numel();
    }
    if (session) {
      session->for_each_parameter(print_hash, terrace::Access::read);
    } else {
      for (const auto& item : model->named_parameters()) {
        print_hash(item.key(), item.value());
      }
    }
    for (const auto& item : model->named_buffers()) {
      print_hash(item.key(), item.value());
    }
    std::printf("parameters %lld\n", static_cast<long long>(count));
    std::printf("peak %llu\n", static_cast<unsigned long long>(peak_resident_bytes()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
