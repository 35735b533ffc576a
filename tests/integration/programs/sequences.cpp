// Sequences, spectra and losses: ops that read lengths, counts and indices themselves, beside the parameters.
#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

namespace nn = torch::nn;

/// An encoder and a decoder over sequences of several lengths.
struct Packed : nn::Module {
  Packed()
      : encoder(register_module("encoder", nn::LSTM(nn::LSTMOptions(32, 64).num_layers(2).bidirectional(true)))),
        decoder(register_module("decoder", nn::GRU(nn::GRUOptions(128, 64)))) {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& lengths) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(x, lengths, false, false);
    const auto encoded = std::get<0>(encoder->forward_with_packed_input(packed));
    const auto decoded = std::get<0>(decoder->forward_with_packed_input(encoded));
    return std::get<0>(nn::utils::rnn::pad_packed_sequence(decoded));
  }

  nn::LSTM encoder;
  nn::GRU decoder;
};

void packed_sequences(World& world) {
  const auto model = world.make<Packed>();
  train(world, *model, [&](int step) {
    return model->forward(torch::randn({7, 4, 32}), torch::tensor({3, 7, 2, 5 - step})).pow(2).mean();
  });
}

void cells(World& world) {
  struct Cells : nn::Module {
    Cells()
        : rnn(register_module("rnn", nn::RNN(nn::RNNOptions(64, 64).nonlinearity(torch::kReLU)))),
          lstm(register_module("lstm", nn::LSTMCell(64, 64))),
          gru(register_module("gru", nn::GRUCell(64, 64))) {}
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor through = std::get<0>(rnn(x));
      at::Tensor hidden = torch::zeros({4, 64});
      at::Tensor memory = torch::zeros({4, 64});
      for (std::int64_t i = 0; i < through.size(0); ++i) {
        std::tie(hidden, memory) = lstm(through[i], std::make_tuple(hidden, memory));
        hidden = gru(hidden, memory);
      }
      return hidden.pow(2).mean();
    }
    nn::RNN rnn;
    nn::LSTMCell lstm;
    nn::GRUCell gru;
  };
  const auto model = world.make<Cells>();
  train(world, *model, [&](int) { return model->forward(torch::randn({5, 4, 64})); });
}

void losses(World& world) {
  struct Judged : nn::Module {
    Judged()
        : stack(register_module("stack", std::make_shared<Stack>())),
          words(register_module(
              "words", nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(64, 512, {32, 128})))) {}
    std::shared_ptr<Stack> stack;
    nn::AdaptiveLogSoftmaxWithLoss words;
  };
  const auto model = world.make<Judged>();
  train(world, *model, [&](int) {
    const at::Tensor x = model->stack->forward(torch::randn({16, 64}));
    at::Tensor targets = torch::randint(64, {16}, torch::kLong);
    targets[2] = -100;
    const auto options = nn::functional::CrossEntropyFuncOptions().label_smoothing(0.1);
    const at::Tensor classes = nn::functional::cross_entropy(x, targets, options);
    const at::Tensor aligned =
        nn::CTCLoss()(x.view({8, 2, 64}).log_softmax(2), torch::randint(1, 64, {2, 3}, torch::kLong),
                      torch::tensor({8, 6}), torch::tensor({3, 2}));
    return classes + aligned + model->words(x, torch::randint(512, {16}, torch::kLong)).loss;
  });
}

void spectra(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    for (auto& layer : model->layers) {
      const at::Tensor filter = torch::fft::rfft(layer->weight[0]);
      x = torch::tanh(layer(torch::fft::irfft(torch::fft::rfft(x) * filter, 64)));
    }
    return torch::abs(torch::complex(x, x.roll(1, 1))).mean() + torch::linalg_svdvals(model->layers[0]->weight).sum();
  });
}

}  // namespace

std::vector<Program> sequence_programs() {
  return {
      {"packed sequences", "lengths on the CPU, read by the op itself", packed_sequences},
      {"cells", "RNN, LSTMCell and GRUCell, step by step", cells},
      {"losses", "CTC, adaptive softmax, smoothed labels with some ignored", losses},
      {"spectra", "Fourier transforms and singular values of weights", spectra},
  };
}

}  // namespace terrace::testing
