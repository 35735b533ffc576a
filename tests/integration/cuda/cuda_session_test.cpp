// What a session promises, on a CUDA device. Run over CUDA in software everywhere, and over a GPU where there is one:
// budgets and chunks are in the device's granules, which are larger there, and so is the model.

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <terrace/terrace.h>
#include <torch/torch.h>

#include "integration/cuda_program.h"
#include "offload/cuda_device.h"
#include "offload/loaded_cuda_driver.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

const at::Device cuda(at::kCUDA, 0);

class CudaSession : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    driver_ = load_cuda_driver(&why_not);
    if (driver_ != nullptr) {
      ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
      why_not = load_cuda_program();  // before LibTorch is asked for anything
    }
    if (!why_not.empty()) {
      GTEST_SKIP() << why_not;
    }
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    at::set_num_threads(1);
    unit_ = driver_->granularity();
  }

  bool is_gpu() const { return unit_ >= (std::uint64_t{2} << 20U); }
  /// In bytes of which a weight of it, squared, fills a chunk.
  std::int64_t width() const { return is_gpu() ? 704 : 128; }

  /// Everything at rest on the host. `room`, in chunks, beside them for what the program computes.
  Config config(std::uint64_t chunks, std::uint64_t room) const {
    Config config;
    config.device.kind = "cuda";
    config.device.chunks = chunks * unit_;
    // A pool of a GPU grows by ten granules.
    config.device.memory = (chunks + (is_gpu() ? 12 : 1) * room) * unit_;
    config.host.memory = 640 * unit_;
    config.placement.chunk = unit_;
    config.log.level = LogLevel::error;
    return config;
  }
  Config on_host(std::uint64_t chunks = 12, std::uint64_t room = 64) const {
    Config result = config(chunks, room);
    result.placement.parameters = result.placement.gradients = result.placement.optimizer =
        Config::Shares{.device = 0, .host = 1, .nvme = 0};
    return result;
  }
  Config on_nvme(const TemporaryFolder& folder) const {
    Config result = config(12, 64);
    result.host.memory = 40 * unit_;
    result.nvme.paths = {folder.path()};
    result.nvme.memory = 640 * unit_;
    result.placement.parameters = result.placement.gradients = result.placement.optimizer =
        Config::Shares{.device = 0, .host = 0, .nvme = 1};
    return result;
  }
  Config on_device() const {
    Config result = config(300, 64);
    result.placement.parameters = result.placement.gradients = Config::Shares{.device = 1, .host = 0, .nvme = 0};
    return result;
  }

  TrainingOptions training() const {
    TrainingOptions options;
    options.shape.width = width();
    options.steps = 4;
    options.device = cuda;
    return options;
  }
  void expect_same(const TrainingResult& left, const TrainingResult& right) {
    EXPECT_EQ(left.losses, right.losses);
    EXPECT_EQ(left.norms, right.norms);
    ASSERT_EQ(left.parameters.size(), right.parameters.size());
    for (std::size_t i = 0; i < left.parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(left.parameters[i], right.parameters[i])) << "parameter " << i;
    }
  }

  std::shared_ptr<CudaDriver> driver_;
  std::uint64_t unit_ = 0;
};

// ---- Placement never changes results

TEST_F(CudaSession, trains_from_the_host_as_plain_libtorch_does_on_the_device) {
  expect_same(train_small_gpt(training(), on_host()), train_small_gpt(training()));
}

TEST_F(CudaSession, trains_from_nvme_as_plain_libtorch_does_on_the_device) {
  const TemporaryFolder folder;
  expect_same(train_small_gpt(training(), on_nvme(folder)), train_small_gpt(training()));
}

TEST_F(CudaSession, trains_on_the_device_alone_as_plain_libtorch_does) {
  expect_same(train_small_gpt(training(), on_device()), train_small_gpt(training()));
}

TEST_F(CudaSession, trains_in_bfloat16_as_plain_libtorch_does_on_the_device) {
  TrainingOptions options = training();
  options.type = at::kBFloat16;
  expect_same(train_small_gpt(options, on_host(8, 192)), train_small_gpt(options));
}

TEST_F(CudaSession, recomputes_blocks_with_dropout_to_the_same_bits) {
  TrainingOptions options = training();
  options.shape.dropout = 0.1;
  Config keep = on_host(12, 192);
  keep.placement.activations = "keep";
  Config recompute = on_host(12, 192);
  recompute.placement.activations = "recompute";
  expect_same(train_small_gpt(options, recompute), train_small_gpt(options, keep));
}

TEST_F(CudaSession, never_uses_more_of_the_device_than_its_budget) {
  train_small_gpt(training());  // so that libraries have what they keep
  cuda_pool().give_back_kept();
  const std::uint64_t free_before = driver_->memory_info().free_bytes;
  const Config config = on_host();
  std::uint64_t most_used = 0;
  train_small_gpt(training(), config, [&](Session& session) {
    const MemoryUsage usage = session.memory_usage();
    EXPECT_LE(usage.peak(Tier::device), config.device.memory.value());
    EXPECT_LE(usage.peak(Tier::host), config.host.memory.value());
    EXPECT_GT(usage.moved(Link::host_to_device), 0U);
    most_used = std::max(most_used, free_before - std::min(free_before, driver_->memory_info().free_bytes));
  });
  EXPECT_GT(most_used, 0U);
  EXPECT_LE(most_used, config.device.memory.value());
}

// ---- What a program sees

/// Two layers with a batch norm between them.
struct Net : torch::nn::Module {
  explicit Net(std::int64_t width)
      : up(register_module("up", torch::nn::Linear(width, width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(width))),
        down(register_module("down", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(norm(up(x)))).pow(2).mean(); }

  torch::nn::Linear up;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear down;
};

TEST_F(CudaSession, what_it_manages_reports_the_device_and_stays_there) {
  Session session(on_host());
  EXPECT_EQ(session.device(), cuda);
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  EXPECT_TRUE(net->up->weight.is_cpu());
  const at::Tensor weight = net->up->weight;
  session.manage(*net);
  for (const at::Tensor& parameter : net->parameters()) EXPECT_EQ(parameter.device(), cuda);
  for (const at::Tensor& buffer : net->buffers()) EXPECT_EQ(buffer.device(), cuda);
  EXPECT_TRUE(weight.is_same(net->up->weight));
  EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
  const std::uint64_t moved = session.memory_usage().moved(Link::host_to_device);
  net->to(session.device());
  EXPECT_EQ(session.memory_usage().moved(Link::host_to_device), moved);
}

TEST_F(CudaSession, bytes_of_a_managed_parameter_are_out_of_reach_but_for_ops) {
  Session session(on_host());
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  session.manage(*net);
  EXPECT_THROW(static_cast<void>(net->up->weight.data_ptr()), c10::Error);
  EXPECT_EQ(net->up->weight.sum().device(), cuda);
}

TEST_F(CudaSession, manages_a_model_that_is_on_the_device_already) {
  torch::manual_seed(3);
  const auto net = std::make_shared<Net>(width());
  const at::Tensor before = net->up->weight.detach().clone();
  const at::Tensor mean = net->norm->running_mean.detach().clone();
  net->to(cuda);
  Session session(on_host());
  session.manage(*net);
  EXPECT_TRUE(same_bits(net->up->weight.detach().cpu(), before));
  EXPECT_TRUE(same_bits(net->norm->running_mean.cpu(), mean));
}

TEST_F(CudaSession, gathered_parameters_are_ordinary_tensors_on_the_device) {
  torch::manual_seed(3);
  Session session(on_host());
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  const at::Tensor before = net->up->weight.detach().clone();
  session.manage(*net);
  {
    const at::NoGradGuard no_grad;
    const Gathered view = session.gather(*net, Access::write);
    EXPECT_NE(net->up->weight.data_ptr(), nullptr);
    EXPECT_TRUE(same_bits(net->up->weight.cpu(), before));
    net->up->weight.add_(1);
  }
  EXPECT_TRUE(same_bits(net->up->weight.detach().cpu(), before + 1));
  std::size_t visited = 0;
  session.for_each_parameter([&](const std::string& name, at::Tensor& parameter) {
    EXPECT_EQ(parameter.device(), cuda) << name;
    ++visited;
  });
  EXPECT_EQ(visited, net->parameters().size());
}

TEST_F(CudaSession, gradients_are_tensors_on_the_device_that_the_program_may_read_and_keep) {
  Session session(on_host());
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  session.manage(*net);
  AdamW optimizer(session, AdamW::Options(1e-2));
  const at::Tensor x = torch::randn({4, width()}).to(cuda);
  net->forward(x).backward();
  const at::Tensor kept = net->up->weight.grad();
  EXPECT_EQ(kept.device(), cuda);
  const at::Tensor value = kept.cpu();
  optimizer.step();
  optimizer.zero_grad();
  net->forward(x).backward();  // makes another one in its place
  EXPECT_TRUE(same_bits(kept.cpu(), value));
}

TEST_F(CudaSession, batch_norm_changes_its_statistics_on_the_device_as_without_a_session) {
  const auto statistics = [&](bool managed) {
    torch::manual_seed(5);
    std::optional<Session> session;
    if (managed) session.emplace(on_host());
    const auto build = [&] { return std::make_shared<Net>(width()); };
    const auto net = session ? session->construct(build) : build();
    managed ? session->manage(*net) : net->to(cuda);
    const at::Tensor x = torch::randn({8, width()}).to(cuda);
    for (int i = 0; i < 3; ++i) net->forward(x);
    return std::pair(net->norm->running_mean.cpu(), net->norm->running_var.cpu());
  };
  const auto with = statistics(true);
  const auto without = statistics(false);
  EXPECT_TRUE(same_bits(with.first, without.first));
  EXPECT_TRUE(same_bits(with.second, without.second));
}

TEST_F(CudaSession, takes_in_a_parameter_whose_storage_was_replaced_by_one_on_the_cpu) {
  Session session(on_host());
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  session.manage(*net);
  AdamW optimizer(session, AdamW::Options(1e-2));
  const at::Tensor replacement = torch::full({width(), width()}, 0.25);
  net->up->weight.set_data(replacement.clone());
  session.manage(*net);
  EXPECT_EQ(net->up->weight.device(), cuda);
  EXPECT_TRUE(same_bits(net->up->weight.detach().cpu(), replacement));
}

TEST_F(CudaSession, tensors_on_the_cpu_are_the_programs_own) {
  Session session(on_host());
  const std::uint64_t before = session.memory_usage().now(Tier::device);
  const at::Tensor large = torch::ones({1 << 20});
  EXPECT_EQ(session.memory_usage().now(Tier::device), before);
  EXPECT_EQ(large.sum().item<float>(), float{1 << 20});
}

TEST_F(CudaSession, at_its_end_the_model_is_ordinary_on_the_device) {
  torch::manual_seed(3);
  std::shared_ptr<Net> net;
  at::Tensor before;
  {
    Session session(on_host());
    net = session.construct([&] { return std::make_shared<Net>(width()); });
    before = net->up->weight.detach().clone();
    session.manage(*net);
  }
  EXPECT_EQ(net->up->weight.device(), cuda);
  EXPECT_NE(net->up->weight.data_ptr(), nullptr);
  EXPECT_TRUE(same_bits(net->up->weight.detach().cpu(), before));
  EXPECT_EQ(net->norm->running_mean.cpu().numel(), width());
}

TEST_F(CudaSession, at_its_end_a_model_that_does_not_fit_the_device_stays_guarded) {
  std::vector<torch::nn::Linear> layers;
  torch::nn::ModuleList model;
  {
    Session session(on_host(4, 8));
    const std::uint64_t capacity = session.memory_usage().capacity(Tier::device);
    session.construct([&] {
      const auto bytes = static_cast<std::uint64_t>(width() * width()) * sizeof(float);
      for (std::uint64_t held = 0; held < capacity + bytes; held += bytes) {
        model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width(), width()).bias(false)));
      }
      return 0;
    });
    session.manage(*model);
  }
  EXPECT_THROW(static_cast<void>(model->parameters().front().data_ptr()), c10::Error);
}

// ---- Checkpoints

TEST_F(CudaSession, goes_on_from_a_checkpoint_to_the_same_bits) {
  const TemporaryFolder folder;
  const auto checkpoint = folder.path() / "checkpoint";
  const auto run = [&](bool resumed) {
    torch::manual_seed(9);
    Session session(on_host());
    const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
    session.manage(*net);
    AdamW optimizer(session, AdamW::Options(1e-2));
    const at::Tensor x = torch::randn({8, width()}).to(cuda);
    const auto step = [&] {
      const at::Tensor loss = net->forward(x);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.item<float>();
    };
    if (resumed) {
      session.load(checkpoint);
    } else {
      step();
      session.save(checkpoint);
    }
    const std::vector<float> losses{step(), step()};
    return std::pair(losses, net->norm->running_var.cpu());
  };
  const auto whole = run(false);
  const auto resumed = run(true);
  EXPECT_EQ(whole.first, resumed.first);
  EXPECT_TRUE(same_bits(whole.second, resumed.second));
}

TEST_F(CudaSession, a_checkpoint_holds_the_devices_generator) {
  const TemporaryFolder folder;
  Session session(on_host());
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  session.manage(*net);
  at::Generator generator = at::globalContext().defaultGenerator(cuda);
  generator.set_current_seed(42);
  generator.set_offset(16);
  session.save(folder.path() / "checkpoint");
  generator.set_current_seed(1);
  session.load(folder.path() / "checkpoint");
  EXPECT_EQ(generator.current_seed(), 42U);
  EXPECT_EQ(generator.get_offset(), 16U);
}

// ---- Budgets

TEST_F(CudaSession, a_tensor_that_does_not_fit_is_refused_with_the_typed_error) {
  Session session(on_host(4, 8));
  const auto capacity = static_cast<std::int64_t>(session.memory_usage().capacity(Tier::device));
  EXPECT_THROW(torch::empty({2 * capacity}, torch::TensorOptions().dtype(at::kByte).device(cuda)),
               c10::OutOfMemoryError);
  const auto error = last_error_as<OutOfMemory>(session);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), HasSubstr("device:"));
  EXPECT_EQ(torch::ones({16}, cuda).sum().item<float>(), 16.0f);
}

TEST_F(CudaSession, chunks_leave_for_the_programs_tensors_and_come_back) {
  Session session(on_host(16, 16));
  const auto net = session.construct([&] { return std::make_shared<Net>(width()); });
  session.manage(*net);
  const at::Tensor before = net->up->weight.detach().cpu();
  net->down->weight.sum();
  const auto bytes = static_cast<std::int64_t>(session.memory_usage().capacity(Tier::device) / 10 * 9);
  for (int i = 0; i < 3; ++i) {
    at::Tensor large = torch::empty({bytes}, torch::TensorOptions().dtype(at::kByte).device(cuda));
    large.zero_();
    large.reset();
    EXPECT_TRUE(same_bits(net->up->weight.detach().cpu(), before));  // for which the pool gives back what it keeps
  }
  EXPECT_LE(session.memory_usage().peak(Tier::device), session.memory_usage().capacity(Tier::device));
}

TEST_F(CudaSession, tensors_may_outlive_the_session) {
  at::Tensor kept;
  {
    Session session(on_host());
    kept = torch::ones({1024}, cuda);
  }
  EXPECT_EQ(kept.sum().item<float>(), 1024.0f);
}

TEST_F(CudaSession, sessions_follow_each_other) {
  for (int i = 0; i < 3; ++i) {
    TrainingOptions options = training();
    options.steps = 1;
    train_small_gpt(options, on_host());
  }
  Config emulated = tight_config();
  emulated.device.kind = "emulated";
  Session session(emulated);
  EXPECT_TRUE(session.device().is_cpu());
}

}  // namespace
}  // namespace terrace::testing
