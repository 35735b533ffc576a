// Ops that reach managed bytes in ways that their schema, or the tensor that they are given, does not tell of.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t features = 4096;  // a chunk
constexpr int others = 8;                // as many chunks, of which the device holds three

struct Model : torch::nn::Module {
  Model() {
    mean = register_parameter("mean", torch::zeros({features}), /*requires_grad=*/false);
    variance = register_parameter("variance", torch::ones({features}), /*requires_grad=*/false);
    lengths = register_parameter("lengths", torch::tensor({3, 5}, at::kLong), /*requires_grad=*/false);
    values = register_parameter("values", torch::randn({features}));
    for (int i = 0; i < others; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(tight_width, tight_width)));
    }
  }
  /// What was on the device before has to leave.
  void use_the_others() {
    at::Tensor x = torch::ones({1, tight_width});
    for (auto& layer : layers) {
      x = layer(x);
    }
  }
  at::Tensor mean, variance, lengths, values;
  std::vector<torch::nn::Linear> layers;
};

/// Under a NoGradGuard.
void expect_the_bits_of_unmanaged(const std::function<Tensors(Model&)>& program) {
  const auto run = [&](std::optional<Session> session) {
    torch::manual_seed(3);
    Model model;
    if (session) {
      session->manage(model);
    }
    const torch::NoGradGuard no_grad;
    return program(model);
  };
  const Tensors expected = run(std::nullopt);
  expect_same_bits(run(std::make_optional<Session>(tight_config())), expected);
}

TEST(Operands, running_statistics_that_are_frozen_parameters_keep_what_batches_add) {
  expect_the_bits_of_unmanaged([](Model& model) {
    for (int i = 0; i < 3; ++i) {
      torch::batch_norm(torch::randn({2, features}) + 5, {}, {}, model.mean, model.variance, /*training=*/true,
                        /*momentum=*/0.5, /*eps=*/1e-5, /*cudnn_enabled=*/false);
      model.use_the_others();
    }
    return Tensors{model.mean.clone(), model.variance.clone()};
  });
}

TEST(Operands, of_ops_made_of_others_that_read_by_pointer_are_there) {
  expect_the_bits_of_unmanaged([](Model& model) {
    const at::Tensor weight = model.layers[0]->weight;
    Tensors results{torch::max_pool1d(weight, 2), torch::max_pool1d(weight.detach(), 4)};
    for (const at::Tensor& part : torch::tensor_split(weight, model.lengths, /*dim=*/0)) {
      results.push_back(part.clone());
    }
    const at::Tensor log_probs = torch::log_softmax(torch::randn({10, 2, 6}), -1);
    results.push_back(
        torch::ctc_loss(log_probs, torch::randint(1, 6, {2, 5}, at::kLong), model.lengths + 5, model.lengths));
    model.use_the_others();
    results.push_back(torch::max_pool1d(weight, 2));
    return results;
  });
}

TEST(Operands, sparse_tensors_made_of_parameters_are_there) {
  expect_the_bits_of_unmanaged([](Model& model) {
    const at::Tensor rows = torch::arange(features, at::kLong).div(tight_width, "floor");
    const at::Tensor columns = torch::arange(features, at::kLong).remainder(tight_width);
    const at::Tensor coordinates =
        torch::sparse_coo_tensor(torch::stack({rows, columns}), model.values, {tight_width, tight_width});
    const at::Tensor compressed =
        torch::sparse_csr_tensor(torch::arange(tight_width + 1, at::kLong) * tight_width, columns, model.values,
                                 {tight_width, tight_width}, at::TensorOptions(at::kFloat));
    model.use_the_others();
    const at::Tensor dense = torch::randn({tight_width, tight_width});
    Tensors results{coordinates.to_dense(), torch::mm(coordinates, dense), coordinates.coalesce().values().clone(),
                    compressed.matmul(dense)};
    coordinates.mul_(2);  // and so the parameter's bytes
    model.use_the_others();
    results.push_back(model.values.clone());
    return results;
  });
}

}  // namespace
}  // namespace terrace::testing
