// A session takes models of every kind: with buffers, tied, frozen and unusual parameters, several of them, and what is
// added later.

#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/session_world.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;
using World = SessionWorld;

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
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), model->parameters().size() + 2) << "as of LibTorch's";
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

TEST(Session, unfrozen_parameters_have_the_norm_that_they_have_without_a_session) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto model = world.make([] { return std::make_shared<Mlp>(); });
    const auto set_frozen = [&](bool frozen) {
      for (std::size_t i = 0; i < 3; ++i) {
        model->layers[i]->weight.set_requires_grad(!frozen);
        model->layers[i]->bias.set_requires_grad(!frozen);
      }
    };
    set_frozen(true);
    world.manage(*model);
    const auto optimizer = world.adamw(*model);
    optimizer->max_gradient_norm(0.01);
    Tensors results;
    for (int step = 0; step < 6; ++step) {
      set_frozen(step < 2);
      train(*model, *optimizer, 1, results);
      results.push_back(torch::full({}, *optimizer->gradient_norm(), at::kDouble));
    }
    add_copies(*model, results);
    return results;
  });
}

TEST(Session, frozen_parameters_may_lose_the_gradient_that_they_have_after_the_optimizer_was_made) {
  const Config config = tight();
  World world(&config);
  const auto model = world.make([] { return std::make_shared<Mlp>(); });
  model->forward(batch()).backward();
  model->layers[0]->weight.set_requires_grad(false);
  world.manage(*model);
  const auto optimizer = world.adamw(*model);
  EXPECT_THROW(optimizer->step(), LogicError);
  model->zero_grad();
  Tensors losses;
  EXPECT_NO_THROW(train(*model, *optimizer, 1, losses));
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
