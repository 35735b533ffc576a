#include "tests/integration/small_gpt.h"

#include <cstring>

#include <gtest/gtest.h>

namespace terrace::testing {
namespace {

std::vector<torch::optim::OptimizerParamGroup> groups_of(const SmallGpt& model) {
  std::vector<at::Tensor> decayed;
  std::vector<at::Tensor> plain;
  for (const at::Tensor& parameter : model.parameters()) {
    (parameter.dim() >= 2 ? decayed : plain).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<AdamW::Options>(AdamW::Options(3e-3).weight_decay(0.1)));
  groups.emplace_back(plain, std::make_unique<AdamW::Options>(AdamW::Options(3e-3).weight_decay(0.0)));
  return groups;
}

}  // namespace

TrainingResult train_small_gpt(const TrainingOptions& options, const std::optional<Config>& config,
                               const std::function<void(Session&)>& after_step) {
  at::set_num_threads(options.threads);
  torch::manual_seed(7);
  std::optional<Session> session;
  if (config) {
    session.emplace(*config);
  }
  const auto build = [&] {
    auto model = std::make_shared<SmallGpt>(options.shape);
    model->to(options.type);
    return model;
  };
  const std::shared_ptr<SmallGpt> model = session ? session->construct(build) : build();
  const at::Device device = session ? session->device() : options.device;
  if (session) {
    session->manage(*model);
  } else {
    model->to(device);
  }
  const auto groups = groups_of(*model);
  auto optimizer = session ? std::make_unique<AdamW>(*session, groups)
                           : std::make_unique<AdamW>(groups, AdamW::Options(), options.optimizer);
  optimizer->max_gradient_norm(options.max_gradient_norm);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  TrainingResult result;
  for (int step = 0; step < options.steps; ++step) {
    for (int micro = 0; micro < options.micro_batches; ++micro) {
      const auto tokens =
          torch::randint(options.shape.vocabulary, {2, options.shape.sequence + 1}, generator, torch::kLong).to(device);
      const auto loss = model->forward(tokens.slice(1, 0, -1), tokens.slice(1, 1)) / options.micro_batches;
      loss.backward();
      result.losses.push_back(loss.item<float>());
    }
    optimizer->step();
    optimizer->zero_grad();
    result.norms.push_back(optimizer->gradient_norm().value_or(0));
    if (session && after_step) {
      after_step(*session);
    }
  }
  optimizer.reset();
  session.reset();  // the parameters are ordinary tensors again
  for (const at::Tensor& parameter : model->parameters()) {
    result.parameters.push_back(parameter.detach().to(at::kCPU, parameter.scalar_type(), false, /*copy=*/true));
  }
  return result;
}

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         std::memcmp(left.contiguous().const_data_ptr(), right.contiguous().const_data_ptr(), left.nbytes()) == 0;
}

void expect_same_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << "tensor " << i << " of " << expected.size();
  }
}

}  // namespace terrace::testing
