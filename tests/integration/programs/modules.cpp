// LibTorch's modules, and ways to put them together.
#include <sstream>

#include <ATen/autocast_mode.h>

#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

namespace nn = torch::nn;

/// Trains a module built by `build`; `loss_of` gives a loss from it and the output of a stack, [16, 64].
template <class Build, class LossOf>
void with_module(World& world, Build&& build, LossOf&& loss_of) {
  struct Made : nn::Module {
    explicit Made(const std::decay_t<Build>& build)
        : stack(register_module("stack", std::make_shared<Stack>())), module(register_module("module", build())) {}
    std::shared_ptr<Stack> stack;
    std::decay_t<decltype(build())> module;
  };
  const auto model = world.make<Made>(build);
  train(world, *model, [&](int) { return loss_of(model->module, model->stack->forward(torch::randn({16, 64}))); });
}

void transformer(World& world) {
  with_module(
      world, [] { return nn::Transformer(nn::TransformerOptions(64, 4, 2, 2).dim_feedforward(128).dropout(0.1)); },
      [](nn::Transformer& module, const at::Tensor& x) {
        const at::Tensor source = x.view({8, 2, 64});
        return module(source, torch::randn({4, 2, 64})).pow(2).mean();
      });
}

void attention(World& world) {
  with_module(
      world, [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(64, 4).dropout(0.1)); },
      [](nn::MultiheadAttention& module, const at::Tensor& x) {
        const at::Tensor queries = x.view({8, 2, 64});
        return std::get<0>(module(queries, queries, queries)).pow(2).mean();
      });
}

void lstm(World& world) {
  with_module(
      world, [] { return nn::LSTM(nn::LSTMOptions(64, 64).num_layers(2).bidirectional(true)); },
      [](nn::LSTM& module, const at::Tensor& x) {
        return std::get<0>(module(x.view({4, 4, 64}))).pow(2).mean();
      });
}

void gru(World& world) {
  with_module(
      world, [] { return nn::GRU(nn::GRUOptions(64, 64).num_layers(2).dropout(0.2)); },
      [](nn::GRU& module, const at::Tensor& x) {
        return std::get<0>(module(x.view({4, 4, 64}))).pow(2).mean();
      });
}

void conv1d(World& world) {
  with_module(
      world, [] { return nn::Conv1d(nn::Conv1dOptions(16, 64, 5).padding(2)); },
      [](nn::Conv1d& module, const at::Tensor& x) {
        return module(x.view({4, 16, 16})).pow(2).mean();
      });
}

void conv2d(World& world) {
  with_module(
      world, [] { return nn::Conv2d(nn::Conv2dOptions(16, 64, 3).stride(2).groups(2)); },
      [](nn::Conv2d& module, const at::Tensor& x) {
        return module(x.view({1, 16, 8, 8})).pow(2).mean();
      });
}

void conv3d(World& world) {
  with_module(
      world, [] { return nn::Conv3d(nn::Conv3dOptions(4, 32, 3).padding(1)); },
      [](nn::Conv3d& module, const at::Tensor& x) {
        return module(x.view({1, 4, 4, 8, 8})).pow(2).mean();
      });
}

void batch_norm(World& world) {
  struct Normed : nn::Module {
    Normed() {
      for (int i = 0; i < 3; ++i) {
        convolutions.push_back(register_module(numbered("c", i), nn::Conv2d(nn::Conv2dOptions(32, 32, 3))));
        norms.push_back(register_module(numbered("n", i), nn::BatchNorm2d(32)));
      }
    }
    at::Tensor forward(at::Tensor x) {
      for (std::size_t i = 0; i < norms.size(); ++i) {
        x = torch::relu(norms[i](convolutions[i](x)));
      }
      return x.pow(2).mean();
    }
    std::vector<nn::Conv2d> convolutions;
    std::vector<nn::BatchNorm2d> norms;
  };
  const auto model = world.make<Normed>();
  train(world, *model, [&](int) { return model->forward(torch::randn({4, 32, 10, 10})); });
  model->eval();
  const at::NoGradGuard no_grad;
  world.record("evaluated", model->forward(torch::randn({4, 32, 10, 10})));
}

void embedding(World& world) {
  with_module(
      world, [] { return nn::Embedding(nn::EmbeddingOptions(512, 64).padding_idx(0).max_norm(4.0)); },
      [](nn::Embedding& module, const at::Tensor& x) {
        at::Tensor indices = torch::randint(64, {16}, torch::kLong);
        indices[3] = 0;  // the padding: it gets no gradient
        return (module(indices) * x).pow(2).mean();
      });
}

void embedding_bag(World& world) {
  with_module(
      world, [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(512, 64).mode(torch::kMean)); },
      [](nn::EmbeddingBag& module, const at::Tensor& x) {
        return (module(torch::randint(512, {16, 3}, torch::kLong)) * x).pow(2).mean();
      });
}

struct Expert : nn::Module {
  Expert() : up(register_module("up", nn::Linear(64, 128))), down(register_module("down", nn::Linear(128, 64))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  nn::Linear up, down;
};

void mixture_of_experts(World& world) {
  struct Mixture : nn::Module {
    Mixture() : router(register_module("router", nn::Linear(64, 6))) {
      for (int i = 0; i < 6; ++i) {
        experts.push_back(register_module(numbered("expert", i), std::make_shared<Expert>()));
      }
    }
    at::Tensor forward(const at::Tensor& x, int step, World& world) {
      const at::Tensor scores = torch::softmax(router(x), 1);
      const at::Tensor chosen = scores.argmax(1);
      at::Tensor out = x;
      std::ostringstream used;
      for (std::size_t i = 0; i < experts.size(); ++i) {
        const at::Tensor mine = (chosen == static_cast<std::int64_t>(i)).nonzero().flatten();
        if (mine.numel() == 0 || static_cast<int>(i) == step) {  // no token comes, or none may
          continue;
        }
        used << i << ' ';
        out = out.index_add(0, mine,
                            experts[i]->forward(x.index_select(0, mine)) *
                                scores.index_select(0, mine).select(1, static_cast<std::int64_t>(i)).unsqueeze(1));
      }
      world.record("used", used.str());
      return out.pow(2).mean();
    }
    nn::Linear router;
    std::vector<std::shared_ptr<Expert>> experts;
  };
  const auto model = world.make<Mixture>();
  train(world, *model, [&](int step) { return model->forward(torch::randn({12, 64}), step, world); });
}

/// y = x W^T with a backward of its own, which halves the weight's gradient.
struct HalvedLinear : torch::autograd::Function<HalvedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0]) * 0.5};
  }
};

void custom_function(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    for (auto& layer : model->layers) {
      x = torch::tanh(HalvedLinear::apply(x, layer->weight) + layer->bias);
    }
    return x.pow(2).mean();
  });
}

/// Autocast to bfloat16 for as long as this lives, also where an op throws.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

void autocast(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor out;
    {
      const Autocast autocast;
      out = model->forward(torch::randn({8, 64}));
    }
    world.record("type", std::string(c10::toString(out.scalar_type())));
    return out.to(at::kFloat).pow(2).mean();
  });
}

void dropout_in_block(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    for (auto& layer : model->layers) {
      x = block([layer](const at::Tensor& in) mutable { return torch::dropout(torch::tanh(layer(in)), 0.3, true); }, x);
    }
    return x.pow(2).mean();
  });
}

void nested_blocks(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    for (std::size_t i = 0; i + 1 < model->layers.size(); i += 2) {
      x = block(
          [a = model->layers[i], b = model->layers[i + 1]](const at::Tensor& in) mutable {
            const at::Tensor inner =
                block([a](const at::Tensor& y) mutable { return torch::dropout(torch::tanh(a(y)), 0.2, true); }, in);
            return torch::tanh(b(inner)) + in;
          },
          x);
    }
    return x.pow(2).mean();
  });
}

void several_inputs_and_outputs(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    at::Tensor y = torch::randn({8, 64});
    for (auto& layer : model->layers) {
      std::tie(x, y) = block(
          [layer](const at::Tensor& a, const at::Tensor& b) mutable {
            const at::Tensor sum = torch::tanh(layer(a + b));
            return std::make_tuple(sum, b - sum);
          },
          x, y);
    }
    return (x * y).mean();
  });
}

void tensor_lists(World& world) {
  const auto model = world.make<Stack>(64, 12);
  train(world, *model, [&](int) {
    std::vector<at::Tensor> weights;
    for (int layer : {1, 2, 3, 4}) {
      weights.push_back(model->layers[layer]->weight);
    }
    {
      const at::NoGradGuard no_grad;
      at::_foreach_mul_(weights, 0.999);
    }
    const at::Tensor all = torch::stack(weights).sum(0);
    const at::Tensor beside = torch::cat(weights, 1);
    const std::vector<at::Tensor> norms = at::_foreach_norm(weights);
    return model->loss() + torch::randn({4, 64}).mm(all).pow(2).mean() +
           torch::randn({4, 64}).mm(beside).pow(2).mean() + torch::stack(norms).sum() * 0.01;
  });
}

}  // namespace

std::vector<Program> module_programs() {
  return {
      {"Transformer", "torch::nn's, encoder and decoder, with dropout", transformer},
      {"MultiheadAttention", "one parameter for three projections", attention},
      {"LSTM", "two layers, both directions, one op over eight parameters each", lstm},
      {"GRU", "two layers with dropout", gru},
      {"Conv1d", "", conv1d},
      {"Conv2d", "strides and groups", conv2d},
      {"Conv3d", "", conv3d},
      {"BatchNorm", "buffers that change with no declared write; evaluation", batch_norm},
      {"Embedding with padding index", "and rows renormalised in forward", embedding},
      {"EmbeddingBag", "means over bags", embedding_bag},
      {"mixture of experts", "some experts get no token in a step", mixture_of_experts},
      {"custom autograd functions", "save_for_backward of a parameter", custom_function},
      {"autocast", "bfloat16 copies of float32 weights, cached", autocast},
      {"dropout inside block", "generator restored for the second run", dropout_in_block, nullptr, true},
      {"nested blocks", "a block within a block", nested_blocks, nullptr, true},
      {"blocks with several inputs and outputs", "two of each", several_inputs_and_outputs, nullptr, true},
      {"ops on tensor lists", "stack, cat and foreach over parameters", tensor_lists},
  };
}

}  // namespace terrace::testing
