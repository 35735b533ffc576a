// Parameters in every ordinary shape of use.
#include <sstream>

#include "tests/integration/programs/programs.h"

namespace terrace::testing {
namespace {

void tied(World& world) {
  struct Tied : torch::nn::Module {
    Tied()
        : embedding(register_module("embedding", torch::nn::Embedding(256, 64))),
          stack(register_module("stack", std::make_shared<Stack>())) {
      head = register_parameter("head", embedding->weight);
    }
    torch::nn::Embedding embedding;
    std::shared_ptr<Stack> stack;
    at::Tensor head;
  };
  const auto model = world.make<Tied>();
  train(world, *model, [&](int) {
    const at::Tensor tokens = torch::randint(256, {2, 16}, torch::kLong);
    const at::Tensor logits = torch::linear(model->stack->forward(model->embedding(tokens[0])), model->head);
    return torch::nn::functional::cross_entropy(logits, tokens[1]);
  });
}

void frozen(World& world) {
  const auto model = world.make<Stack>();
  for (int layer : {0, 3, 4}) {
    model->layers[layer]->weight.set_requires_grad(false);
  }
  train(
      world, *model,
      [&](int step) {
        if (step == 2) {
          model->layers[3]->weight.set_requires_grad(true);  // and one is trained from here on
        }
        return model->loss();
      },
      5);
}

void unused(World& world) {
  const auto model = world.make<Stack>();
  train(world, *model, [&](int step) {
    at::Tensor x = torch::randn({8, model->width});
    for (std::size_t layer = 0; layer < model->layers.size() - 1; ++layer) {  // the last never
      if (static_cast<int>(layer) != step) {
        x = torch::tanh(model->layers[layer](x));
      }
    }
    return x.pow(2).mean();
  });
}

void strided(World& world) {
  struct Strided : torch::nn::Module {
    Strided() {
      for (int i = 0; i < 6; ++i) {
        weights.push_back(register_parameter(numbered("w", i), torch::randn({64, 96}).t() * 0.1));
        backs.push_back(register_parameter(numbered("b", i), torch::randn({96, 64}).t() * 0.1));
      }
      filter = register_parameter("filter", torch::randn({4, 3, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast));
    }
    std::vector<at::Tensor> weights, backs;
    at::Tensor filter;
  };
  const auto model = world.make<Strided>();
  train(world, *model, [&](int) {
    at::Tensor x = torch::randn({8, 64});
    for (std::size_t i = 0; i < model->weights.size(); ++i) {
      x = torch::tanh(torch::linear(torch::tanh(torch::linear(x, model->weights[i])), model->backs[i]));
    }
    return x.pow(2).mean() + torch::conv2d(torch::randn({2, 3, 16, 16}), model->filter).pow(2).mean();
  });
}

void empty(World& world) {
  struct WithEmpty : Stack {
    WithEmpty() { nothing = register_parameter("nothing", torch::empty({0, 64})); }
    at::Tensor nothing;
  };
  const auto model = world.make<WithEmpty>();
  world.manage(*model);
  const auto optimizer = world.adamw(AdamW::Groups{torch::optim::OptimizerParamGroup(model->parameters())});
  train(world, *model, *optimizer, [&](int) {
    return model->forward(torch::cat({torch::randn({8, 64}), model->nothing})).pow(2).mean();
  });
}

void scalar(World& world) {
  struct WithScalar : Stack {
    WithScalar() { scale = register_parameter("scale", torch::tensor(0.5)); }
    at::Tensor scale;
  };
  const auto model = world.make<WithScalar>();
  train(world, *model, [&](int) { return (model->forward(torch::randn({8, 64})) * model->scale).pow(2).mean(); });
}

void several_dtypes(World& world) {
  struct Mixed : torch::nn::Module {
    Mixed()
        : wide(register_module("wide", std::make_shared<Stack>())),
          narrow(register_module("narrow", std::make_shared<Stack>())) {
      narrow->to(at::kBFloat16);
      table = register_parameter("table", torch::randn({64}, at::kDouble), /*requires_grad=*/false);
      half = register_parameter("half", torch::randn({64}).to(at::kHalf), /*requires_grad=*/false);
      mask = register_buffer("mask", torch::randint(2, {64}, torch::kLong));
    }
    std::shared_ptr<Stack> wide, narrow;
    at::Tensor table, half, mask;
  };
  const auto model = world.make<Mixed>();
  train(world, *model, [&](int) {
    const at::Tensor x = model->wide->forward(torch::randn({8, 64}));
    const at::Tensor y = model->narrow->forward((x * model->mask).to(at::kBFloat16)).to(at::kFloat);
    return (y.to(at::kDouble) * model->table + model->half).pow(2).mean().to(at::kFloat);
  });
}

void written_in_place(World& world) {
  const auto model = world.make<Stack>();
  std::vector<at::Tensor> averages;
  for (const at::Tensor& parameter : model->parameters()) {
    averages.push_back(parameter.detach().clone());
  }
  world.manage(*model);
  const auto optimizer = world.adamw();
  for (int step = 0; step < 4; ++step) {
    model->loss().backward();
    optimizer->step();
    optimizer->zero_grad();
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].clamp_(-0.12, 0.12);
      averages[i].mul_(0.9).add_(parameters[i], 0.1);
    }
    if (step == 1) {
      torch::nn::init::normal_(model->layers[3]->weight, 0, 0.05);
      model->layers[2]->bias.zero_();
      model->layers[1]->weight[5].fill_(0.25);    // through a view
      model->layers[4]->weight.data().mul_(0.5);  // and through one that is not tracked
      model->layers[0]->weight.copy_(averages[0]);
    }
  }
  for (const at::Tensor& average : averages) {
    world.record("average", average);
  }
  world.record(*model);
}

void replaced_by_set_data(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  train(world, *model, *optimizer, [&](int step) {
    const at::Tensor loss = model->loss();
    if (step == 1) {
      model->layers[2]->weight.set_data(torch::randn({64, 64}) * 0.1);  // the graph has saved the one before
    }
    if (step == 2) {
      model->layers[3]->bias.set_data(model->layers[3]->bias.detach().clone() * 2);
    }
    return step == 1 ? model->loss() : loss;
  });
}

void replaced_by_another_shape(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  model->loss().backward();  // the parameters have been in a graph
  optimizer->zero_grad();
  model->layers[2]->weight.set_data(torch::randn({96, 64}) * 0.1);
  model->layers[2]->bias.set_data(torch::zeros({96}));
  model->layers[3]->weight.set_data(torch::randn({64, 96}) * 0.1);
  train(world, *model, *optimizer, [&](int) { return model->loss(); });
}

void replaced_by_to(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  model->to(world.device());  // does nothing
  model->to(at::kBFloat16);
  const auto optimizer = world.adamw();
  train(world, *model, *optimizer, [&](int) {
    return model->forward(torch::randn({8, 64}).to(at::kBFloat16)).pow(2).mean().to(at::kFloat);
  });
}

void replaced_by_load(World& world) {
  const auto model = world.make<Stack>();
  const auto other = std::make_shared<Stack>();
  std::stringstream archive;
  torch::save(other, archive);
  world.manage(*model);
  const auto optimizer = world.adamw();
  train(world, *model, *optimizer, [&](int step) {
    if (step == 2) {
      std::shared_ptr<Stack> target = model;
      archive.seekg(0);
      torch::load(target, archive);
    }
    return model->loss();
  });
}

/// A frozen linear layer with a trained change of low rank.
struct LowRank : torch::nn::Module {
  explicit LowRank(std::int64_t width)
      : base(register_module("base", torch::nn::Linear(width, width))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(width, 4).bias(false)))),
        up(register_module("up", torch::nn::Linear(torch::nn::LinearOptions(4, width).bias(false)))) {
    for (at::Tensor& parameter : base->parameters()) {
      parameter.set_requires_grad(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return base(x) + up(down(x)); }
  torch::nn::Linear base, down, up;
};

void lora(World& world) {
  struct Adapted : torch::nn::Module {
    Adapted() {
      for (int i = 0; i < 8; ++i) {
        layers.push_back(register_module(numbered("layer", i), std::make_shared<LowRank>(96)));
      }
    }
    std::vector<std::shared_ptr<LowRank>> layers;
  };
  const auto model = world.make<Adapted>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  const auto step = [&] {
    at::Tensor x = torch::randn({8, 96});
    for (const auto& layer : model->layers) {
      x = torch::tanh(layer->forward(x));
    }
    const at::Tensor loss = x.pow(2).mean();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    world.record("loss", loss);
  };
  step();
  std::uint64_t trained = 0;
  for (const auto& layer : model->layers) {
    trained += layer->down->weight.nbytes() + layer->up->weight.nbytes();
  }
  if (Session* session = world.session()) {
    // Of the frozen ones nothing has states or a gradient, and nothing goes back.
    session->synchronize();
    const MemoryUsage before = session->memory_usage();
    for (int i = 0; i < 3; ++i) {
      step();
    }
    session->synchronize();
    const MemoryUsage after = session->memory_usage();
    constexpr std::uint64_t chunk_unit = 4096 * sizeof(float);
    const std::uint64_t room = (trained / chunk_unit + 1) * chunk_unit;  // chunks are rounded up
    const auto moved = [&](Link link) {
      return after.moved(link, Kind::parameter) - before.moved(link, Kind::parameter);
    };
    // What the first step has updated may still have been on its way.
    if (moved(Link::device_to_host) > 0 || moved(Link::host_to_nvme) > 4 * room) {
      throw std::logic_error("frozen weights were written back: " + std::to_string(moved(Link::device_to_host)) +
                             " B and " + std::to_string(moved(Link::host_to_nvme)) + " B");
    }
    for (const Kind kind : {Kind::gradient, Kind::momentum, Kind::variance}) {
      for (const Tier tier : all_tiers) {
        if (after.peak(tier, kind) > 2 * room) {  // a chunk that leaves and comes again may count twice
          throw std::logic_error("frozen weights have " + std::string(name_of(kind)));
        }
      }
    }
  } else {
    for (int i = 0; i < 3; ++i) {
      step();
    }
  }
  world.record(*model);
}

void groups_in_one_chunk(World& world) {
  const auto model = world.make<Stack>(16, 24);  // a chunk holds several layers
  world.manage(*model);
  std::vector<at::Tensor> weights, biases, slow;
  for (std::size_t i = 0; i < model->layers.size(); ++i) {
    (i % 3 == 0 ? slow : weights).push_back(model->layers[i]->weight);
    biases.push_back(model->layers[i]->bias);
  }
  AdamW::Groups groups{torch::optim::OptimizerParamGroup(weights), torch::optim::OptimizerParamGroup(biases),
                       torch::optim::OptimizerParamGroup(slow)};
  groups[0].set_options(std::make_unique<AdamW::Options>(AdamW::Options(1e-2).weight_decay(0.2)));
  groups[1].set_options(std::make_unique<AdamW::Options>(AdamW::Options(1e-2).weight_decay(0)));
  groups[2].set_options(std::make_unique<AdamW::Options>(AdamW::Options(1e-4).betas({0.8, 0.99}).eps(1e-6)));
  train(world, *model, *world.adamw(groups), [&](int) { return model->loss(); });
}

void schedulers(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  const auto optimizer = world.adamw();
  torch::optim::StepLR scheduler(*optimizer, /*step_size=*/2, /*gamma=*/0.1);
  for (int step = 0; step < 5; ++step) {
    model->loss().backward();
    optimizer->step();
    scheduler.step();
    optimizer->zero_grad();
  }
  world.record(*model);
}

void two_optimizers(World& world) {
  const auto model = world.make<Stack>();
  world.manage(*model);
  std::vector<at::Tensor> first, second;
  for (std::size_t i = 0; i < model->layers.size(); ++i) {
    for (const at::Tensor& parameter : model->layers[i]->parameters()) {
      (i % 2 == 0 ? first : second).push_back(parameter);
    }
  }
  const auto often = world.adamw(AdamW::Groups{torch::optim::OptimizerParamGroup(first)});
  const auto seldom = world.adamw(AdamW::Groups{torch::optim::OptimizerParamGroup(second)}, AdamW::Options(3e-3));
  for (int step = 0; step < 4; ++step) {
    const at::Tensor loss = model->loss();
    loss.backward();
    world.record("loss", loss);
    often->step();
    often->zero_grad();
    if (step % 2 == 1) {
      seldom->step();
      seldom->zero_grad();
    }
  }
  world.record(*model);
}

}  // namespace

std::vector<Program> parameter_programs() {
  return {
      {"tied", "one tensor under two names", tied},
      {"frozen", "half of the weights need no gradient", frozen},
      {"unused", "one layer never runs, others not in every step", unused},
      {"strided", "transposed and channels-last parameters", strided},
      {"empty", "a parameter of no elements", empty},
      {"scalar", "a parameter of no dimensions", scalar},
      {"several dtypes", "float32 and bfloat16 trained, float64 and float16 frozen, integers beside", several_dtypes},
      {"written in place", "clipped, averaged, initialised anew, through views", written_in_place},
      {"replaced by set_data", "beside a live graph", replaced_by_set_data},
      {"replaced by set_data of another shape", "a layer is made wider before the first step",
       replaced_by_another_shape},
      {"replaced by .to()", "to the device, and to bfloat16", replaced_by_to},
      {"replaced by torch::load", "between two steps", replaced_by_load},
      {"LoRA", "frozen weights without gradient, state or write-back", lora},
      {"parameter groups in one chunk", "three settings", groups_in_one_chunk},
      {"schedulers", "LibTorch's StepLR", schedulers},
      {"two optimizers", "over disjoint parameters, one steps half as often", two_optimizers},
  };
}

}  // namespace terrace::testing
