// p.grad stays what LibTorch users know, in every ordinary use, though its bytes are managed.

#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/gradient_world.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using World = GradientWorld;

/// Its backward gives ones in a tensor that AccumulateGrad has to copy, or nothing.
struct Ones : torch::autograd::Function<Ones> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool gives) {
    context->saved_data["sizes"] = x.sizes().vec();
    context->saved_data["gives"] = gives;
    return torch::ones({});
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const bool gives = context->saved_data["gives"].toBool();
    return {gives ? gradients[0].expand(context->saved_data["sizes"].toIntVector()) : at::Tensor(), {}};
  }
};

}  // namespace

TEST(Gradients, are_defined_after_backward_and_undefined_after_zero_grad_by_optimizer_or_module) {
  const Config config = tight();
  World world(&config);
  const auto expect_defined = [&](bool defined) {
    for (const at::Tensor& parameter : world.model->parameters()) {
      EXPECT_EQ(parameter.grad().defined(), defined);
    }
  };
  expect_defined(false);
  world.backward();
  expect_defined(true);
  for (const at::Tensor& parameter : world.model->parameters()) {
    EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    EXPECT_EQ(parameter.grad().device(), world.session->device());
    EXPECT_FALSE(parameter.grad().requires_grad());
  }
  world.optimizer->zero_grad();
  expect_defined(false);
  world.backward();
  expect_defined(true);
  world.model->zero_grad();
  expect_defined(false);
  world.backward();
  world.optimizer->step();
  expect_defined(true);  // it keeps its value until it is zeroed
}

TEST(Gradients, zeroed_but_kept_are_zeros_and_accumulate) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      world.backward();
      world.optimizer->step();
      world.optimizer->zero_grad(/*set_to_none=*/false);
      add_gradients(world, results);
      world.backward();
      world.model->zero_grad(/*set_to_none=*/false);
      add_gradients(world, results);
      world.backward();
      world.backward();
      add_gradients(world, results);
    }
    return results;
  });
}

TEST(Gradients, accumulate_over_backward_calls) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 2; ++i) {
      for (int micro = 0; micro < 3; ++micro) {
        world.backward();
        add_gradients(world, results);
      }
      world.step();
    }
    return results;
  });
}

TEST(Gradients, keep_their_value_after_the_step_until_they_are_zeroed) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    world.optimizer->max_gradient_norm(1e-3);  // clipping is the update's own: gradients keep their values
    world.backward();
    world.optimizer->step();
    read_all(world);
    add_gradients(world, results);
    world.optimizer->step();
    world.backward();
    add_gradients(world, results);
    world.step();
    return results;
  });
}

TEST(Gradients, can_be_clipped_by_the_program) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      const double norm = torch::nn::utils::clip_grad_norm_(world.model->parameters(), 1e-3);
      EXPECT_GT(norm, 1e-3);
      results.push_back(torch::tensor(norm, torch::kDouble));
      torch::nn::utils::clip_grad_value_(world.model->parameters(), 1e-5);
      add_gradients(world, results);
      world.step();
    }
    return results;
  });
}

TEST(Gradients, can_be_read_edited_set_and_discarded_by_hand_before_the_step) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      results.push_back(world.weight(0).grad().norm());
      results.push_back(torch::tensor(world.bias(0).grad()[3].item<float>()));
      world.weight(1).grad().mul_(2);
      world.weight(1).grad()[4].zero_();
      world.weight(2).mutable_grad() = torch::full({width, width}, 0.5);
      world.weight(3).mutable_grad() = world.weight(1).grad();  // one tensor, two parameters
      world.weight(4).mutable_grad() = world.weight(4).grad().t();
      world.bias(4).mutable_grad() = world.bias(3).grad().mean().expand({width});
      world.bias(5).mutable_grad() = world.bias(5).grad().clone();
      world.weight(5).mutable_grad().reset();
      read_all(world);
      add_gradients(world, results);
      world.optimizer->step();
      add_gradients(world, results);
      world.weight(4).mutable_grad().reset();  // LibTorch's zero_grad refuses views
      world.bias(4).mutable_grad().reset();
      world.optimizer->zero_grad();
    }
    return results;
  });
}

TEST(Gradients, set_by_hand_before_manage_are_adopted) {
  Tensors results[2];
  for (const bool managed : {false, true}) {
    at::set_num_threads(1);
    torch::manual_seed(5);
    Mlp model;
    model.forward(batch()).backward();
    const Config config = tight();
    std::optional<Session> session;
    if (managed) {
      session.emplace(config);
      session->manage(model);
      EXPECT_ANY_THROW(model.layers[0]->weight.grad().data_ptr());
    }
    {
      const AdamW::Options options(1e-2);
      auto optimizer =
          session ? std::make_unique<AdamW>(*session, options) : std::make_unique<AdamW>(model.parameters(), options);
      optimizer->step();
    }
    for (const at::Tensor& parameter : model.parameters()) {
      results[managed].push_back(parameter.detach().clone());
      results[managed].push_back(parameter.grad().clone());
    }
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(same_bits(results[0][i], results[1][i])) << i;
  }
}

TEST(Gradients, that_the_program_has_set_and_writes_by_tensors_of_its_own_stay_those) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    const at::Tensor own = torch::zeros({width, width});
    const at::Tensor flat = torch::zeros({2 * width});  // as a bucket of several
    world.weight(0).mutable_grad() = own;
    world.weight(1).mutable_grad() = own;
    world.bias(2).mutable_grad() = flat.slice(0, 0, width);
    world.bias(3).mutable_grad() = flat.slice(0, width);
    for (int i = 0; i < 3; ++i) {
      own.fill_(i + 1);
      flat.copy_(torch::arange(2 * width));
      if (i == 2) {
        world.backward();
      }
      read_all(world);
      world.optimizer->step();
      add_gradients(world, results);
      add_parameters(world, results);
    }
    return results;
  });
}

TEST(Gradients, of_another_type_that_the_program_has_set_keep_it_over_the_step) {
  for (const char* const accumulate : {"gradient", "float32"}) {
    for (const at::ScalarType set : {at::kFloat, at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(c10::str(accumulate, ", set as ", set));
      Tensors results[2];
      for (const bool managed : {false, true}) {
        at::set_num_threads(1);
        torch::manual_seed(5);
        Config config = tight();
        config.optimizer.accumulate = accumulate;
        std::optional<Session> session;
        torch::nn::Linear linear(width, width);
        linear->to(torch::kBFloat16);
        if (managed) {
          session.emplace(config);
          session->manage(*linear);
        }
        const AdamW::Options options(1e-2);
        auto optimizer = session ? std::make_unique<AdamW>(*session, options)
                                 : std::make_unique<AdamW>(linear->parameters(), options, config.optimizer);
        for (const at::Tensor& parameter : linear->parameters()) {
          parameter.mutable_grad() = torch::full_like(parameter, 0.3, set);
        }
        for (int i = 0; i < 2; ++i) {
          optimizer->step();
          linear(torch::randn({4, width}, at::kBFloat16)).sum().backward();
          for (const at::Tensor& parameter : linear->parameters()) {
            results[managed].push_back(parameter.detach().clone());
            results[managed].push_back(parameter.grad().clone());
          }
        }
      }
      expect_same_bits(results[1], results[0]);
    }
  }
}

TEST(Gradients, held_by_the_program_keep_their_value_over_zero_grad_and_the_next_backward) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    Tensors held;
    for (int i = 0; i < 3; ++i) {
      world.backward();
      held.push_back(world.weight(2).grad());
      held.push_back(world.bias(5).grad());
      held.push_back(world.weight(4).grad().t());  // a view holds it too
      world.step();
      read_all(world);
      for (const at::Tensor& gradient : held) {
        results.push_back(gradient.clone());
      }
    }
    world.weight(2).mutable_grad() = held[0];  // and can be given back
    world.optimizer->step();
    return results;
  });
}

TEST(Gradients, held_by_the_program_outlive_the_session) {
  at::Tensor held, expected;
  {
    const Config config = tight();
    World world(&config);
    world.backward();
    held = world.weight(1).grad();
    expected = held.clone();
    world.step();
    read_all(world);
  }
  EXPECT_NO_THROW(held.data_ptr());
  EXPECT_TRUE(same_bits(held, expected));
}

TEST(Gradients, that_were_discarded_cost_no_transfers) {
  const TemporaryFolder folder;
  for (const Config& config : {tight(), tight_on_nvme(folder)}) {
    for (const bool by_module : {false, true}) {
      World world(&config);
      std::vector<std::uint64_t> moved_by_backward;
      for (int i = 0; i < 3; ++i) {
        const std::uint64_t start = gradient_bytes_moved(world);
        world.backward();
        const std::uint64_t end = gradient_bytes_moved(world);
        moved_by_backward.push_back(end - start);
        by_module ? world.model->zero_grad() : world.optimizer->zero_grad();
        read_all(world);
        EXPECT_EQ(gradient_bytes_moved(world), end);
      }
      EXPECT_EQ(moved_by_backward[1], moved_by_backward[0]) << "what was discarded has been brought back";
      EXPECT_EQ(moved_by_backward[2], moved_by_backward[0]);
    }
  }
}

TEST(Gradients, that_are_kept_do_cost_transfers_under_the_same_pressure) {
  const Config config = tight();
  World world(&config);
  world.backward();
  const std::uint64_t before = gradient_bytes_moved(world);
  read_all(world);
  EXPECT_GT(gradient_bytes_moved(world), before);
}

TEST(Gradients, parameters_without_one_are_skipped_by_the_step) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int i = 0; i < 4; ++i) {
      world.optimizer->max_gradient_norm(i % 2 == 0 ? 0 : 1e-3);
      at::Tensor x = batch();
      for (std::size_t layer = 0; layer < world.model->layers.size(); ++layer) {
        if (static_cast<int>(layer) % 3 != i % 3) {  // as experts that are not chosen
          x = torch::tanh(world.model->layers[layer](x));
        }
      }
      x.pow(2).mean().backward();
      const Tensors before = [&] {
        Tensors copies;
        add_parameters(world, copies);
        return copies;
      }();
      world.optimizer->step();
      const auto parameters = world.model->parameters();
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        EXPECT_EQ(same_bits(parameters[p].detach().clone(), before[p]), !parameters[p].grad().defined());
      }
      add_gradients(world, results);
      world.optimizer->zero_grad();
    }
    return results;
  });
}

TEST(Gradients, that_are_accumulated_are_seen_by_hooks_of_the_accumulator_set_after_manage) {
  struct Decay : torch::autograd::FunctionPreHook {
    explicit Decay(at::Tensor& of) : parameter(of) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
      const torch::NoGradGuard no_grad;
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
      return gradients;
    }
    at::Tensor& parameter;
  };
  expect_the_bits_of_unmanaged([](GradientWorld& world) {
    Tensors results;
    const auto accumulator = torch::autograd::impl::grad_accumulator(world.weight(1));
    for (int step = 0; step < 3; ++step) {
      if (step > 0) accumulator->add_pre_hook(std::make_unique<Decay>(world.weight(1)));
      world.backward();
      world.backward();
      add_gradients(world, results);
      world.step();
    }
    return results;
  });
}

TEST(Gradients, of_a_complex_parameter_are_complex_and_add_up) {
  const auto trained = [](std::optional<Session> session) {
    torch::manual_seed(3);
    torch::nn::Module model;
    at::Tensor& weight = model.register_parameter("weight", torch::randn({64, 64}, at::kComplexFloat));
    if (session) {
      session->manage(model);
    }
    for (int i = 0; i < 2; ++i) {
      at::abs(weight * weight).sum().backward();
    }
    return weight.grad().clone();
  };
  const at::Tensor plain = trained(std::nullopt);
  EXPECT_EQ(plain.scalar_type(), at::kComplexFloat);
  EXPECT_TRUE(same_bits(trained(std::make_optional<Session>(tight())), plain));
}

TEST(Gradients, are_as_they_were_after_a_backward_that_found_no_room_to_add_to_them) {
  Config config = tight();
  config.device.chunks = std::nullopt;
  Session session(config);
  torch::nn::Module model;
  const at::Tensor weight = model.register_parameter("weight", torch::randn({128, 128}));
  session.manage(model);
  Ones::apply(weight, true).backward();
  {
    const std::uint64_t room = session.memory_usage().capacity(Tier::device);
    const at::Tensor most_of_it = torch::empty({static_cast<std::int64_t>(room - weight.nbytes() / 2)}, at::kByte);
    EXPECT_THROW(Ones::apply(weight, true).backward(), c10::Error);
    EXPECT_TRUE(last_error_as<OutOfMemory>(session).has_value());
    EXPECT_TRUE(weight.grad().defined());
  }
  EXPECT_EQ(weight.grad().min().item<float>(), 1);
  Ones::apply(weight, true).backward();
  EXPECT_EQ(weight.grad().min().item<float>(), 2);
  EXPECT_EQ(weight.grad().max().item<float>(), 2);
}

TEST(Gradients, are_as_they_were_after_a_backward_that_gives_none) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    world.backward();
    read_all(world);
    Ones::apply(world.weight(0), false).backward();
    add_gradients(world, results);
    world.step();
    Ones::apply(world.weight(0), false).backward();
    add_gradients(world, results);
    return results;
  });
}

}  // namespace terrace::testing
