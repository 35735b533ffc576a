// A session keeps its promises to a program that knows nothing of it: where tensors are, what may touch their
// bytes, what survives eviction, and what is left when the session has ended.

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/session_world.h"
#include "tests/integration/tight_session.h"
#include "tests/offload/resource_limit.h"

namespace terrace::testing {
namespace {

using World = SessionWorld;

}  // namespace

TEST(Session, logs_at_its_level_from_its_beginning) {
  set_log_level(LogLevel::info);
  ::testing::internal::CaptureStderr();
  { const Session session(tight_config()); }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "nor which device it found";
}

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
    expect_same_bits(actual, expected);
  }
}

TEST(Session, its_end_where_no_file_can_be_opened_leaves_tensors_guarded) {
  for (const char* const activations : {"keep", "host"}) {
    Config config = tight();
    config.placement.activations = activations;
    World world(&config);
    const auto model = world.build<Mlp>();
    {
      const ResourceLimit no_more_files(RLIMIT_NOFILE, 0);
      world.session.reset();
    }
    expect_refusal_naming("layer1.weight", [&] { model->layers[1]->weight.data_ptr(); });
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
  expect_same_bits(actual, expected);
}

}  // namespace terrace::testing
