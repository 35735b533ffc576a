// The gradient norm, most of which is found while backward goes on: from gradients as they will be if the step goes
// like the last one, and it may not.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "terrace/terrace.h"
#include "tests/integration/mlp_world.h"

namespace terrace::testing {
namespace {

void backward(World& world, Tensors& results) {
  const at::Tensor loss = world.model->forward(batch(world.model->layers[0]->weight.scalar_type()));
  loss.backward();
  results.push_back(loss.detach().clone());
}

void update(AdamW& optimizer, Tensors& results) {
  optimizer.step();
  results.push_back(at::scalar_tensor(optimizer.gradient_norm().value(), at::kDouble));
  optimizer.zero_grad();
}

/// Steps that are clipped, with something done before each.
void expect_the_bits_of_unmanaged_with(const std::function<void(World&, int step, Tensors&)>& before_step,
                                       at::ScalarType type = at::kFloat) {
  expect_the_bits_of_unmanaged(
      [&](World& world) {
        const auto optimizer = world.adamw(usual());
        optimizer->max_gradient_norm(1e-2);
        Tensors results;
        for (int step = 0; step < 8; ++step) {
          before_step(world, step, results);
          update(*optimizer, results);
        }
        return results;
      },
      type);
}

TEST(NormBehindBackward, is_that_of_unmanaged_training) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    expect_the_bits_of_unmanaged_with([](World& world, int, Tensors& results) { backward(world, results); }, type);
  }
}

TEST(NormBehindBackward, counts_every_micro_batch_however_many_there_were_in_the_step_before) {
  expect_the_bits_of_unmanaged_with([](World& world, int step, Tensors& results) {
    for (const int batches : {1, 1, 3, 3, 3, 1, 2, 4}) {
      if (step-- == 0) {
        for (int i = 0; i < batches; ++i) backward(world, results);
      }
    }
  });
}

TEST(NormBehindBackward, is_that_of_gradients_which_the_program_has_changed_since) {
  expect_the_bits_of_unmanaged_with([](World& world, int step, Tensors& results) {
    backward(world, results);
    const torch::NoGradGuard no_grad;
    auto& layers = world.model->layers;
    layers[1]->weight.mutable_grad().mul_(2);
    if (step % 2 == 1) layers[2]->weight.mutable_grad() = layers[2]->weight.grad() * 3;
    if (step % 3 == 2) layers[3]->weight.mutable_grad().reset();
    const at::Tensor halved = layers[4]->bias.grad();  // which the program goes on holding
    halved.mul_(0.5);
  });
}

TEST(NormBehindBackward, is_that_of_gradients_which_hooks_have_changed) {
  expect_the_bits_of_unmanaged_with([](World& world, int step, Tensors& results) {
    if (step == 0) {
      world.model->layers[1]->weight.register_hook([](const at::Tensor& gradient) { return gradient * 4; });
    }
    backward(world, results);
  });
}

TEST(NormBehindBackward, is_that_of_what_was_trained_where_layers_are_frozen_for_some_steps) {
  expect_the_bits_of_unmanaged_with([](World& world, int step, Tensors& results) {
    world.model->layers[2]->weight.set_requires_grad(step % 3 != 1);
    world.model->layers[3]->bias.set_requires_grad(step % 4 != 2);
    backward(world, results);
  });
}

TEST(NormBehindBackward, is_that_of_gradients_that_were_zeroed_in_place) {
  expect_the_bits_of_unmanaged([](World& world) {
    const auto optimizer = world.adamw(usual());
    optimizer->max_gradient_norm(1e-2);
    Tensors results;
    for (int step = 0; step < 6; ++step) {
      backward(world, results);
      optimizer->step();
      results.push_back(at::scalar_tensor(optimizer->gradient_norm().value(), at::kDouble));
      optimizer->zero_grad(/*set_to_none=*/false);
    }
    return results;
  });
}

TEST(NormBehindBackward, bears_clipping_that_begins_and_ends_and_optimizers_that_end) {
  expect_the_bits_of_unmanaged([](World& world) {
    Tensors results;
    for (int round = 0; round < 2; ++round) {
      const auto optimizer = world.adamw(usual());
      for (const double most : {1e-2, 1e-2, 1e-2, 0.0, 1e-2, 1e-2}) {
        optimizer->max_gradient_norm(most);
        backward(world, results);
        optimizer->step();
        optimizer->zero_grad();
      }
      backward(world, results);  // nobody takes this step
      world.model->zero_grad();
    }
    return results;
  });
}

/// What four steps bring of gradients from NVMe, once there have been a few.
std::uint64_t gradient_bytes_from_nvme(double max_gradient_norm) {
  const TemporaryFolder folder;
  Config config = tight_on_nvme(folder, 14);
  config.device.chunks = 8 * chunk_bytes;
  at::set_num_threads(1);
  torch::manual_seed(5);
  Session session(config);
  Mlp model(24);
  session.manage(model);
  AdamW optimizer(session, usual());
  optimizer.max_gradient_norm(max_gradient_norm);
  std::uint64_t before = 0;
  for (int step = 0; step < 8; ++step) {
    if (step == 4) {
      session.synchronize();
      before = session.memory_usage().moved(Link::nvme_to_host, Kind::gradient);
    }
    model.forward(batch()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  session.synchronize();
  return session.memory_usage().moved(Link::nvme_to_host, Kind::gradient) - before;
}

TEST(NormBehindBackward, brings_few_gradients_from_nvme_that_an_update_alone_would_not) {
  const std::uint64_t without = gradient_bytes_from_nvme(0);
  EXPECT_GT(without, 4 * 8 * chunk_bytes) << "most are written to NVMe";
  EXPECT_LT(gradient_bytes_from_nvme(1), without + 4 * 5 * chunk_bytes);  // all of them were 24 a step
}

}  // namespace
}  // namespace terrace::testing
