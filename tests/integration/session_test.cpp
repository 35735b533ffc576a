// A session keeps its promises to a program that knows nothing of it: where tensors are, what may touch their
// bytes, what survives eviction, and what is left when the session has ended.

#include <functional>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_mlp.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

/// What a program runs in: with a session, or without one.
struct World {
  explicit World(const Config* config = nullptr) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    if (config != nullptr) {
      host_holds_models = config->nvme.paths.empty();
      session.emplace(*config);
    }
  }

  /// Under `construct`, where the host has room for a model.
  template <class Make>
  auto make(Make&& make_it) {
    return session && host_holds_models ? session->construct(make_it) : make_it();
  }

  template <class Model, class... Arguments>
  std::shared_ptr<Model> build(Arguments... arguments) {
    auto model = make([&] { return std::make_shared<Model>(arguments...); });
    manage(*model);
    return model;
  }

  void manage(torch::nn::Module& module) {
    if (session) {
      session->manage(module);
    }
  }

  std::unique_ptr<AdamW> adamw(const torch::nn::Module& module) {
    const AdamW::Options options = AdamW::Options(1e-2).weight_decay(0.1);
    return session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(module.parameters(), options);
  }

  bool host_holds_models = false;
  std::optional<Session> session;
};

/// Trains and adds each loss to `results`.
template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int steps, Tensors& results) {
  for (int i = 0; i < steps; ++i) {
    const at::Tensor loss = model.forward(batch());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    results.push_back(loss.detach().clone());
  }
}

void add_copies(const torch::nn::Module& module, Tensors& results) {
  for (const at::Tensor& tensor : module.parameters()) {
    results.push_back(tensor.detach().clone());
  }
  for (const at::Tensor& tensor : module.buffers()) {
    results.push_back(tensor.detach().clone());
  }
}

void expect_kinds_sum_and_peaks_within_budget(const MemoryUsage& usage) {
  for (const Tier tier : all_tiers) {
    std::uint64_t sum = 0;
    for (const Kind kind : all_kinds) {
      sum += usage.now(tier, kind);
    }
    EXPECT_EQ(sum, usage.now(tier)) << name_of(tier);
    EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
  }
}

/// Runs a program without a session and in one of each configuration, and expects the same bits of all that it
/// returns; the parameters must have moved to the device more than once.
void expect_the_bits_of_unmanaged(const std::function<Tensors(World&)>& program) {
  World plain;
  const Tensors expected = program(plain);
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    SCOPED_TRACE(config.nvme.paths.empty() ? "all on the host" : "all on NVMe");
    Tensors actual;
    {
      World managed(&config);
      actual = program(managed);
      const MemoryUsage usage = managed.session->memory_usage();
      expect_kinds_sum_and_peaks_within_budget(usage);
      EXPECT_GT(usage.moved(Link::host_to_device, Kind::parameter), 2 * config.device.chunks.value());
      EXPECT_EQ(usage.moved(Link::nvme_to_host, Kind::parameter) > 0, !config.nvme.paths.empty());
      EXPECT_EQ(managed.session->last_error(), nullptr);
    }
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i;
    }
  }
}

/// Reads every parameter, so that those read first have to leave the device.
void read_all(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    parameter.detach().sum();
  }
}

template <class Touch>
void expect_refusal_naming(const std::string& name, Touch&& touch) {
  try {
    touch();
    ADD_FAILURE() << "the bytes of " << name << " could be touched";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'" + name + "'"));
  }
}

}  // namespace

TEST(Session, manage_leaves_parameters_on_the_sessions_device) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Mlp>();
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_EQ(parameter.device(), world.session->device());
    EXPECT_TRUE(parameter.is_leaf());
    EXPECT_TRUE(parameter.requires_grad());
  }
  const auto usage = world.session->memory_usage();
  EXPECT_LE(usage.chunk_peak(Tier::device), config.device.chunks.value());
}

TEST(Session, moving_a_managed_module_to_the_sessions_device_does_nothing) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Mlp>();
  const at::Tensor before = model->layers[0]->weight.detach().clone();
  model->to(world.session->device());
  EXPECT_TRUE(same_bits(model->layers[0]->weight.detach().clone(), before));
  EXPECT_ANY_THROW(model->layers[0]->weight.data_ptr());
  Tensors losses;
  train(*model, *world.adamw(*model), 1, losses);
}

TEST(Session, touching_bytes_outside_an_op_throws_and_names_the_parameter) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Mlp>();
  const at::Tensor weight = model->layers[1]->weight;
  const std::string name = "layer1.weight";
  for (const bool resident : {false, true}) {
    SCOPED_TRACE(resident ? "resident" : "away");
    if (resident) {
      weight.sum();
    } else {
      read_all(*model);  // ends far from layer1
    }
    expect_refusal_naming(name, [&] { weight.data_ptr(); });
    expect_refusal_naming(name, [&] { weight.const_data_ptr(); });
    expect_refusal_naming(name, [&] { weight.mutable_data_ptr<float>(); });
    expect_refusal_naming(name, [&] { weight.accessor<float, 2>(); });
    expect_refusal_naming(name, [&] { weight.storage().data(); });
    expect_refusal_naming(name, [&] { weight.storage().mutable_data(); });
    expect_refusal_naming(name, [&] { weight.detach().data_ptr(); });
    expect_refusal_naming(name, [&] { weight[3].data_ptr(); });
    expect_refusal_naming(name, [&] { weight.t().slice(0, 2, 7).data_ptr<float>(); });
  }
  expect_refusal_naming("layer0.bias", [&] { model->layers[0]->bias.data_ptr(); });
}

TEST(Session, the_bytes_of_a_managed_gradient_can_be_touched_by_ops_only) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Mlp>();
  model->forward(batch()).backward();
  expect_refusal_naming("layer2.weight.grad", [&] { model->layers[2]->weight.grad().data_ptr(); });
}

TEST(Session, writing_a_managed_model_to_an_archive_throws_and_names_a_parameter) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Mlp>();
  expect_refusal_naming("layer0.weight", [&] {
    torch::serialize::OutputArchive archive;
    model->save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
  });
}

TEST(Session, ops_work_on_managed_parameters_as_on_ordinary_ones) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>();
    Tensors results;
    for (const auto& layer : model->layers) {
      const at::Tensor& weight = layer->weight;
      results.push_back(weight.detach().clone());
      results.push_back(torch::tensor(weight[3][4].item<float>()));
      results.push_back(torch::tensor(torch::equal(weight, weight.detach().clone())));
      results.push_back(torch::tensor(weight.allclose(model->layers[0]->weight)));
      results.push_back(weight.detach().index({torch::tensor({1, 5, 1})}));
      results.push_back(torch::cat({weight.detach(), layer->bias.detach().unsqueeze(0)}));
      results.push_back(torch::stack({layer->bias.detach(), model->layers[0]->bias.detach()}));
      results.push_back(weight.detach().t().contiguous());
      results.push_back(weight.detach().to(torch::kDouble).sum());
      results.push_back(weight.detach().masked_select(weight.detach() > 0));
      std::ostringstream printed;
      printed << layer->bias;
      const std::string text = printed.str();
      results.push_back(torch::tensor(std::vector<std::int64_t>(text.begin(), text.end())));
    }
    read_all(*model);
    return results;
  });
}

TEST(Session, in_place_writes_to_parameters_are_honoured_and_survive_eviction) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>();
    const auto optimizer = world.adamw(*model);
    Tensors results;
    for (int round = 0; round < 3; ++round) {
      train(*model, *optimizer, 1, results);
      {
        const torch::NoGradGuard no_grad;
        model->layers[0]->weight.mul_(0.5);
        model->layers[1]->weight.data().clamp_(-0.05, 0.05);
        model->layers[2]->weight.copy_(model->layers[5]->weight);
        model->layers[3]->bias.slice(0, 10, 20).fill_(0.25);
        at::_foreach_add_({model->layers[1]->bias, model->layers[2]->bias}, 0.01);
        torch::add_out(model->layers[4]->bias, model->layers[3]->bias, torch::ones({width}));
      }
      torch::nn::init::xavier_uniform_(model->layers[4]->weight);
      torch::nn::init::zeros_(model->layers[5]->bias);
      read_all(*model);
      add_copies(*model, results);
    }
    return results;
  });
}

TEST(Session, a_moving_average_of_managed_parameters_is_exact) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>();
    const auto average = world.build<Mlp>();
    for (at::Tensor& parameter : average->parameters()) {
      parameter.requires_grad_(false);
    }
    const auto optimizer = world.adamw(*model);
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      train(*model, *optimizer, 1, results);
      const auto to = average->parameters();
      const auto from = model->parameters();
      for (std::size_t p = 0; p < to.size(); ++p) {
        to[p].data().lerp_(from[p].data(), 0.1);
      }
    }
    add_copies(*average, results);
    return results;
  });
}

TEST(Session, evaluation_without_gradients_between_steps_changes_nothing) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>();
    const auto optimizer = world.adamw(*model);
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      train(*model, *optimizer, 1, results);
      const torch::NoGradGuard no_grad;
      model->eval();
      results.push_back(model->forward(batch()));
      model->train();
    }
    add_copies(*model, results);
    return results;
  });
}

namespace {

struct Normalized : torch::nn::Module {
  Normalized() {
    for (int i = 0; i < 4; ++i) {
      const std::string number = std::to_string(i);
      layers.push_back(register_module("layer" + number, torch::nn::Linear(width, width)));
      norms.push_back(register_module("norm" + number, torch::nn::BatchNorm1d(width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = torch::tanh(norms[i](layers[i](x)));
    }
    return x.pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<torch::nn::BatchNorm1d> norms;
};

}  // namespace

TEST(Session, running_statistics_of_batch_norm_are_those_of_unmanaged) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Normalized>();
    const auto optimizer = world.adamw(*model);
    Tensors results;
    train(*model, *optimizer, 4, results);
    add_copies(*model, results);
    model->eval();
    results.push_back(model->forward(batch()).detach());
    return results;
  });
}

TEST(Session, buffers_are_counted_as_such_and_stay_on_the_device) {
  const Config config = tight();
  World world(&config);
  const auto model = world.build<Normalized>();
  std::uint64_t bytes = 0;
  for (const at::Tensor& buffer : model->buffers()) {
    bytes += buffer.nbytes();
    EXPECT_NO_THROW(buffer.data_ptr());
  }
  const auto counted = world.session->memory_usage().now(Tier::device, Kind::buffer);
  EXPECT_GE(counted, bytes);
  EXPECT_LE(counted, bytes + 128 * model->buffers().size());
  Tensors losses;
  train(*model, *world.adamw(*model), 2, losses);
  EXPECT_EQ(world.session->memory_usage().now(Tier::device, Kind::buffer), counted);
}

namespace {

struct Tied : torch::nn::Module {
  Tied() {
    embedding = register_parameter("embedding", torch::randn({40, width}) * 0.1);
    middle = register_module("middle", std::make_shared<Mlp>(4));
    head = register_parameter("head", embedding);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::linear(x, embedding).matmul(head);
    for (auto& layer : middle->layers) {
      y = torch::tanh(layer(y));
    }
    return y.pow(2).mean();
  }
  at::Tensor embedding, head;
  std::shared_ptr<Mlp> middle;
};

}  // namespace

TEST(Session, a_weight_tied_under_two_names_is_managed_once) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Tied>();
    if (world.session) {
      std::uint64_t parameters = 0;
      for (const auto& tensor : model->middle->parameters()) {
        parameters += tensor.nbytes();
      }
      parameters += model->embedding.nbytes();
      const auto usage = world.session->memory_usage();
      EXPECT_LT(usage.peak(Tier::host, Kind::parameter) + usage.peak(Tier::nvme, Kind::parameter),
                2 * (parameters + 5 * 4096));
    }
    // Listed once, as torch::optim wants it.
    std::unique_ptr<AdamW> optimizer =
        world.session ? std::make_unique<AdamW>(*world.session, AdamW::Options(1e-2)) : [&] {
          Tensors once = model->middle->parameters();
          once.push_back(model->embedding);
          return std::make_unique<AdamW>(once, AdamW::Options(1e-2));
        }();
    if (world.session) {
      EXPECT_EQ(optimizer->param_groups()[0].params().size(), model->middle->parameters().size() + 1);
    }
    Tensors results;
    train(*model, *optimizer, 3, results);
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, frozen_parameters_have_no_gradient_and_no_state_and_never_leave_the_device_as_bytes) {
  const TemporaryFolder folder;
  const Config config = tight_on_nvme(folder);
  World world(&config);
  const auto model = world.make([] {
    auto made = std::make_shared<Mlp>();
    for (at::Tensor& parameter : made->parameters()) {
      parameter.requires_grad_(false);
    }
    return made;
  });
  world.manage(*model);
  const auto adapter = world.build<Mlp>(1);
  AdamW optimizer(*world.session, AdamW::Options(1e-2));
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 2u);
  const auto step = [&] {
    at::Tensor x = batch();
    x = x + adapter->layers[0](x);
    model->forward(x).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  const MemoryUsage first = world.session->memory_usage();
  constexpr int steps = 10;
  for (int i = 0; i < steps; ++i) {
    step();
  }
  const MemoryUsage last = world.session->memory_usage();
  EXPECT_EQ(last.moved(Link::device_to_host, Kind::parameter), 0u);
  // Every parameter is written to NVMe once; after that the adapter's alone, after each update.
  ASSERT_GT(last.now(Tier::nvme, Kind::parameter), 2 * chunk_bytes) << "that would not tell them apart";
  EXPECT_LE(last.moved(Link::host_to_nvme, Kind::parameter),
            last.now(Tier::nvme, Kind::parameter) + (1 + steps) * chunk_bytes);
  EXPECT_GT(last.moved(Link::host_to_device, Kind::parameter), first.moved(Link::host_to_device, Kind::parameter));
  for (const Kind kind : {Kind::gradient, Kind::momentum, Kind::variance}) {
    for (const Tier tier : all_tiers) {
      EXPECT_LE(last.peak(tier, kind), chunk_bytes) << name_of(kind);
    }
  }
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(Session, an_adapter_on_frozen_weights_trains_to_the_bits_of_unmanaged) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.make([] {
      auto made = std::make_shared<Mlp>(9);
      for (std::size_t i = 0; i < made->layers.size(); ++i) {
        made->layers[i]->weight.requires_grad_(i % 3 == 1);
        made->layers[i]->bias.requires_grad_(i % 2 == 0);
      }
      return made;
    });
    world.manage(*model);
    const auto optimizer = world.adamw(*model);
    Tensors results;
    train(*model, *optimizer, 4, results);
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, several_models_train_in_one_session) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto teacher = world.build<Mlp>();
    const auto student = world.build<Mlp>(3);
    const auto options = AdamW::Options(1e-2);
    std::vector<std::unique_ptr<AdamW>> optimizers;
    for (const Mlp* model : {teacher.get(), student.get()}) {
      const AdamW::Groups groups{torch::optim::OptimizerParamGroup(model->parameters())};
      optimizers.push_back(world.session ? std::make_unique<AdamW>(*world.session, groups, options)
                                         : std::make_unique<AdamW>(groups, options));
    }
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      train(*teacher, *optimizers[0], 1, results);
      train(*student, *optimizers[1], 2, results);
    }
    add_copies(*teacher, results);
    add_copies(*student, results);
    return results;
  });
}

TEST(Session, managing_a_module_twice_is_harmless) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Normalized>();
    if (world.session) {
      const auto before = world.session->memory_usage();
      world.session->manage(*model);
      const auto after = world.session->memory_usage();
      for (const Tier tier : all_tiers) {
        EXPECT_EQ(after.now(tier), before.now(tier)) << name_of(tier);
      }
    }
    const auto optimizer = world.adamw(*model);
    Tensors results;
    train(*model, *optimizer, 2, results);
    world.manage(*model);
    train(*model, *optimizer, 2, results);
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, modules_that_are_added_later_can_be_managed_then) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>(5);
    auto optimizer = world.adamw(*model);
    Tensors results;
    train(*model, *optimizer, 2, results);
    torch::nn::Linear added(width, width);
    model->layers.push_back(model->register_module("added", added));
    world.manage(*model);
    if (!world.session) {  // in a session it joins by itself
      optimizer->param_groups()[0].params().push_back(added->weight);
      optimizer->param_groups()[0].params().push_back(added->bias);
    }
    train(*model, *optimizer, 3, results);
    if (world.session) {
      EXPECT_EQ(optimizer->param_groups()[0].params().size(), 12u);
      expect_refusal_naming("added.weight", [&] { added->weight.data_ptr(); });
    }
    add_copies(*model, results);
    return results;
  });
}

namespace {

/// Parameters of unusual shape: transposed in memory, channels last, scalar, empty.
struct Unusual : torch::nn::Module {
  Unusual() {
    transposed = register_parameter("transposed", torch::randn({width, 50}).t() * 0.1);
    body = register_module("body", std::make_shared<Mlp>(4));
    filter =
        register_parameter("filter", (torch::randn({3, 2, 3, 3}) * 0.1).contiguous(at::MemoryFormat::ChannelsLast));
    scale = register_parameter("scale", torch::tensor(1.5f));
    empty = register_parameter("empty", torch::empty({0, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::linear(torch::linear(x, transposed), transposed.t());
    for (auto& layer : body->layers) {
      y = torch::tanh(layer(y));
    }
    const at::Tensor image = y.reshape({-1, 2, 6, 5});
    return torch::conv2d(image, filter).pow(2).mean() * scale + empty.sum();
  }
  at::Tensor transposed, filter, scale, empty;
  std::shared_ptr<Mlp> body;
};

}  // namespace

TEST(Session, strided_scalar_and_empty_parameters_train_to_the_bits_of_unmanaged) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Unusual>();
    EXPECT_EQ(model->transposed.stride(0), 1);
    const auto optimizer = world.adamw(*model);
    Tensors results;
    train(*model, *optimizer, 4, results);
    EXPECT_EQ(model->transposed.stride(0), 1);
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, kinds_sum_to_tiers_and_no_peak_exceeds_its_budget_at_any_moment) {
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    World world(&config);
    const auto model = world.build<Normalized>();
    const auto check = [&] { expect_kinds_sum_and_peaks_within_budget(world.session->memory_usage()); };
    check();
    AdamW optimizer(*world.session, AdamW::Options(1e-2));
    check();
    for (int i = 0; i < 2; ++i) {
      const at::Tensor loss = model->forward(batch());
      check();
      loss.backward();
      check();
      optimizer.step();
      check();
      optimizer.zero_grad();
      check();
    }
  }
}

TEST(Session, its_end_leaves_ordinary_tensors_with_their_latest_bits_that_train_on) {
  const auto program = [](const Config* config) {
    World world(config);
    const auto model = world.build<Normalized>();
    Tensors results;
    {
      const auto optimizer = world.adamw(*model);
      train(*model, *optimizer, 3, results);
    }
    model->forward(batch()).backward();
    world.session.reset();
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_NO_THROW(parameter.data_ptr());
      EXPECT_NO_THROW(parameter.grad().data_ptr());
      results.push_back(parameter.grad().clone());
    }
    AdamW optimizer(model->parameters(), AdamW::Options(1e-2));
    optimizer.step();
    optimizer.zero_grad();
    train(*model, optimizer, 3, results);
    add_copies(*model, results);
    return results;
  };
  const Tensors expected = program(nullptr);
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    const Tensors actual = program(&config);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i;
    }
  }
}

TEST(Session, tensors_made_in_it_outlive_it) {
  at::Tensor small, large, built;
  {
    const Config config = tight();
    World world(&config);
    small = torch::arange(10);
    large = torch::arange(100000);
    built = world.session->construct([] { return torch::full({50000}, 2.5); });
  }
  EXPECT_EQ(small.sum().item<std::int64_t>(), 45);
  EXPECT_EQ(large.sum().item<std::int64_t>(), 4999950000);
  EXPECT_EQ(built.sum().item<float>(), 125000);
  large.resize_({200000});  // reallocated outside the session
  EXPECT_EQ(large[99999].item<std::int64_t>(), 99999);
}

TEST(Session, tensors_made_before_it_are_not_counted) {
  at::Tensor before = torch::ones({1 << 20});
  const Config config = tight();
  World world(&config);
  EXPECT_LT(world.session->memory_usage().now(Tier::device), 4096u);
  EXPECT_EQ(before.sum().item<float>(), 1 << 20);
  before.reset();
  EXPECT_LT(world.session->memory_usage().now(Tier::device), 4096u);
}

TEST(Session, one_after_another_can_manage_the_same_model) {
  const auto program = [](std::vector<const Config*> configs) {
    Tensors results;
    std::shared_ptr<Mlp> model;
    for (const Config* config : configs) {
      World world(config);
      if (model) {
        world.manage(*model);
      } else {
        model = world.build<Mlp>();
      }
      train(*model, *world.adamw(*model), 3, results);
    }
    add_copies(*model, results);
    return results;
  };
  const TemporaryFolder folder;
  const Config first = tight();
  const Config second = tight_on_nvme(folder);
  const Tensors expected = program({nullptr, nullptr, nullptr});
  const Tensors actual = program({&first, &second, &first});
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i;
  }
}

TEST(Session, an_exception_thrown_mid_forward_leaves_it_usable) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.build<Mlp>();
    const auto optimizer = world.adamw(*model);
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      train(*model, *optimizer, 1, results);
      try {
        at::Tensor x = batch();
        for (auto& layer : model->layers) {
          x = torch::tanh(layer(x));
          if (&layer == &model->layers[3]) {
            throw std::runtime_error("the program's own");
          }
        }
      } catch (const std::runtime_error&) {
      }
      EXPECT_THROW(torch::linear(torch::randn({2, 3}), model->layers[2]->weight), c10::Error);  // an op's own error
    }
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, a_model_that_fits_the_device_only_by_construct_is_refused_outside_with_a_hint) {
  Config config = tight();
  config.device.memory = 1 << 20;
  config.host.memory = 16 << 20;
  World world(&config);
  const auto make = [] { return torch::nn::Linear(1000, 1000); };
  try {
    make();
    FAIL() << "4 MB fitted 1 MiB";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr("construct"));
    EXPECT_THAT(error.what(), HasSubstr("device"));
  }
  ASSERT_NE(world.session->last_error(), nullptr);
  try {
    std::rethrow_exception(world.session->last_error());
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.hint(), HasSubstr("construct"));
  }
  EXPECT_NO_THROW(world.session->construct(make));
}

TEST(Session, a_manage_that_fails_loses_no_bytes) {
  Config config = tight();
  config.host.memory = 6 * chunk_bytes + 4 * 4096;  // the states fit nowhere
  config.timeline.memory = 0;
  config.placement.parameters = Config::Shares{.device = 0, .host = 1, .nvme = 0};
  std::shared_ptr<Mlp> model;
  {
    World plain;
    model = std::make_shared<Mlp>(12);
  }
  Tensors expected;
  add_copies(*model, expected);
  {
    World world(&config);
    EXPECT_THROW(world.manage(*model), OutOfMemory);
  }
  const auto parameters = model->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(parameters[i].detach(), expected[i])) << "parameter " << i;
  }
}

}  // namespace terrace::testing
