// Models larger than the host's budget: what is built leaves for NVMe, and comes back where it is used.

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "offload/choose_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint64_t mib = 1 << 20;
constexpr std::int64_t elements = 16384;  // 64 KiB: the host holds about ten
constexpr int tensors_beyond_host = 40;

using Tensors = std::vector<at::Tensor>;

/// Tensor i is full of i.
Tensors numbered_tensors(int count = tensors_beyond_host) {
  Tensors tensors;
  for (int i = 0; i < count; ++i) {
    tensors.push_back(torch::full({elements}, static_cast<double>(i)));
  }
  return tensors;
}

void expect_numbered(const Tensors& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].min().item<float>(), static_cast<float>(i));
    EXPECT_EQ(tensors[i].max().item<float>(), static_cast<float>(i));
  }
}

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 10; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(128, 128)));
    }
    buffer = register_buffer("buffer", torch::randn({128, 128}));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x.matmul(buffer);
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor buffer;
};

class ConstructTest : public ::testing::Test {
 protected:
  ConstructTest() {
    at::set_num_threads(1);
    torch::manual_seed(5);
    config_.device.memory = 4 * mib;
    config_.host.memory = mib;
    config_.timeline.memory = 0;
    config_.nvme.memory = 16 * mib;
    config_.nvme.paths = {folder_.path()};
    config_.placement.chunk = 64 << 10;
    config_.log.level = LogLevel::off;
  }
  ~ConstructTest() override { decorate_io_engines({}); }

  Session& session() {
    if (!session_) {
      session_.emplace(config_);
    }
    return *session_;
  }
  MemoryUsage usage() { return session().memory_usage(); }

  /// Engines of sessions made from now on do wrong by `rule` while `faulty_` is set.
  void inject(FaultRule rule) {
    rule.when = [this](const IoOperation&) { return faulty_.load(); };
    decorate_io_engines([rule](std::unique_ptr<IoEngine> plain) {
      auto decorated = std::make_unique<FaultInjectingEngine>(std::move(plain));
      decorated->inject(rule);
      return decorated;
    });
  }

  const TemporaryFolder folder_;
  Config config_;
  std::atomic<bool> faulty_{false};
  std::optional<Session> session_;
};

TEST_F(ConstructTest, tensors_beyond_the_hosts_budget_keep_their_bytes) {
  const Tensors tensors = session().construct([] {
    Tensors made = numbered_tensors();
    for (at::Tensor& tensor : made) {
      tensor.add_(1);
    }
    for (at::Tensor& tensor : made) {
      tensor.sub_(1);
    }
    return made;
  });
  expect_numbered(tensors);
  EXPECT_LE(usage().peak(Tier::host), mib);
  EXPECT_GT(usage().moved(Link::host_to_nvme), tensors_beyond_host * elements * 4);
  EXPECT_EQ(usage().moved(Link::host_to_device), 0u);
}

TEST_F(ConstructTest, an_op_has_all_its_operands_at_once) {
  const at::Tensor joined = session().construct([] {
    Tensors tensors = numbered_tensors();
    tensors.resize(4);
    return torch::stack(tensors);
  });
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(joined[i].sum().item<float>(), static_cast<float>(i * elements));
  }
}

TEST_F(ConstructTest, views_and_their_bases_stay_one) {
  session().construct([] {
    const at::Tensor base = torch::zeros({elements});
    const at::Tensor view = base.slice(0, 10, 20);
    numbered_tensors();
    const Tensors others = numbered_tensors();
    view.fill_(3);
    const Tensors more = numbered_tensors();
    EXPECT_EQ(base.sum().item<float>(), 30);
    return 0;
  });
}

TEST_F(ConstructTest, results_that_no_op_has_used_leave_too) {
  // The product is an output of `mul` alone, as parameters often are.
  const Tensors tensors = session().construct([] {
    Tensors made;
    for (int i = 0; i < tensors_beyond_host; ++i) {
      made.push_back(torch::ones({elements}) * i);
    }
    return made;
  });
  expect_numbered(tensors);
}

TEST_F(ConstructTest, bytes_that_have_left_can_be_reached_by_gather_alone) {
  const Tensors tensors = session().construct([] { return numbered_tensors(); });
  try {
    tensors[0].data_ptr();
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), AllOf(HasSubstr("construct"), HasSubstr("gather")));
  }
  const Gathered gathered = session().gather({tensors[0], tensors[1]}, Access::read);
  const auto* const bytes = tensors[1].const_data_ptr<float>();
  const Tensors others = session().construct([] { return numbered_tensors(); });
  EXPECT_EQ(tensors[1].const_data_ptr<float>(), bytes);
  EXPECT_EQ(bytes[elements - 1], 1);
}

TEST_F(ConstructTest, parts_of_sparse_tensors_come_back_where_those_are_used) {
  const auto [sparse, others] = session().construct([] {
    const at::Tensor rows = torch::arange(elements, at::kLong).reshape({1, elements});
    const at::Tensor made = torch::sparse_coo_tensor(rows, torch::full({elements}, 3.0), {elements});
    return std::pair(made, numbered_tensors());  // for which they leave
  });
  EXPECT_GT(usage().now(Tier::nvme), 0u);
  EXPECT_EQ(sparse.to_dense().min().item<float>(), 3);
  expect_numbered(others);
  EXPECT_EQ(sparse.mul(2).to_dense().min().item<float>(), 6);
}

TEST_F(ConstructTest, what_dies_gives_up_its_room) {
  config_.nvme.memory = 4 * mib;
  for (int i = 0; i < 8; ++i) {
    session().construct([] { return numbered_tensors(); });
  }
  const Tensors tensors = session().construct([] { return numbered_tensors(); });
  expect_numbered(tensors);
}

TEST_F(ConstructTest, without_nvme_a_model_beyond_the_budget_is_refused_with_the_way_out) {
  config_.nvme = {};
  EXPECT_THROW(session().construct([] { return numbered_tensors(); }), c10::OutOfMemoryError);
  try {
    std::rethrow_exception(session().last_error());
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.what(), HasSubstr("host"));
    EXPECT_THAT(error.hint(), AllOf(HasSubstr("host.memory"), HasSubstr("nvme.paths")));
  }
  EXPECT_EQ(session().construct([] { return torch::ones({elements}); }).sum().item<float>(), elements);
}

TEST_F(ConstructTest, a_model_beyond_host_and_nvme_is_refused_and_both_are_named) {
  config_.nvme.memory = mib;
  EXPECT_THROW(session().construct([] { return numbered_tensors(); }), c10::OutOfMemoryError);
  try {
    std::rethrow_exception(session().last_error());
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("nvme"), HasSubstr("a tensor that is to leave the host")));
    EXPECT_THAT(error.hint(), AllOf(HasSubstr("raise nvme.memory to at least"), HasSubstr("or host.memory"),
                                    HasSubstr("more for what comes after it")));
  }
  expect_numbered(session().construct([] { return numbered_tensors(12); }));
}

TEST_F(ConstructTest, a_tensor_beyond_the_budget_is_refused_and_the_others_are_unharmed) {
  const Tensors tensors = session().construct([] {
    Tensors made = numbered_tensors();
    EXPECT_THROW(torch::ones({static_cast<std::int64_t>(mib) / 4}), c10::OutOfMemoryError);
    return made;
  });
  expect_numbered(tensors);
}

TEST_F(ConstructTest, a_constructor_that_throws_leaves_its_room) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(session().construct([]() -> int {
      const Tensors made = numbered_tensors();
      throw std::runtime_error("the program's own");
    }),
                 std::runtime_error);
  }
  expect_numbered(session().construct([] { return numbered_tensors(); }));
}

TEST_F(ConstructTest, an_op_whose_bytes_cannot_come_back_throws_why) {
  inject({.fault = Fault::io_error, .direction = IoOperation::Direction::read});
  const Tensors tensors = session().construct([] { return numbered_tensors(); });
  faulty_ = true;
  try {
    tensors[0].sum();
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("EIO"));
  }
  EXPECT_THROW(std::rethrow_exception(session().last_error()), IoError);
  EXPECT_THROW(session().gather({tensors[1]}, Access::read), IoError);
  faulty_ = false;
  expect_numbered(tensors);
}

TEST_F(ConstructTest, a_drive_that_takes_nothing_fails_the_construction_with_its_error) {
  inject({.fault = Fault::no_space, .direction = IoOperation::Direction::write});
  faulty_ = true;
  EXPECT_THROW(session().construct([] { return numbered_tensors(); }), c10::OutOfMemoryError);
  EXPECT_THROW(std::rethrow_exception(session().last_error()), IoError);
}

TEST_F(ConstructTest, tensors_become_ordinary_when_the_session_ends) {
  const Tensors tensors = session().construct([] { return numbered_tensors(); });
  session_.reset();
  EXPECT_EQ(tensors[7].const_data_ptr<float>()[0], 7);
  expect_numbered(tensors);
}

TEST_F(ConstructTest, a_manage_that_fails_leaves_the_model_as_it_was_constructed) {
  const Config::Shares on_nvme{.device = 0, .host = 0, .nvme = 1};
  config_.placement.parameters = on_nvme;
  config_.placement.gradients = on_nvme;
  const auto model = session().construct([] {
    auto made = std::make_shared<Model>();
    const torch::NoGradGuard no_gradients;
    const Tensors parameters = made->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].fill_(static_cast<double>(i));
    }
    return made;
  });
  const Tensors others = session().construct([] { return numbered_tensors(243); });  // no room for the gradients
  EXPECT_THROW(session().manage(*model), OutOfMemory);
  expect_numbered(model->parameters());
  expect_numbered(others);
  EXPECT_LE(usage().peak(Tier::host), mib);
}

TEST_F(ConstructTest, threads_construct_beside_each_other) {
  session();
  std::vector<std::thread> threads;
  std::array<Tensors, 2> tensors;
  for (Tensors& made : tensors) {
    threads.emplace_back([&] {
      made = session().construct([] {
        Tensors all = numbered_tensors();
        for (at::Tensor& tensor : all) {
          tensor.mul_(1);
        }
        return all;
      });
      expect_numbered(made);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Tensors& made : tensors) {
    expect_numbered(made);
  }
}

TEST_F(ConstructTest, a_refused_tensor_does_not_drive_out_the_others) {
  session().construct([&] {
    const Tensors made = numbered_tensors(6);
    EXPECT_THROW(torch::ones({static_cast<std::int64_t>(mib) / 2}), c10::OutOfMemoryError);
    const at::Tensor another = torch::ones({elements});
    EXPECT_EQ(usage().now(Tier::nvme), 0u);
    return 0;
  });
}

TEST_F(ConstructTest, what_the_host_does_not_hold_twice_stays_and_others_leave) {
  session().construct([] {
    const at::Tensor large = torch::ones({static_cast<std::int64_t>(600 << 10) / 4});
    const Tensors others = numbered_tensors();
    expect_numbered(others);
    EXPECT_EQ(large.const_data_ptr<float>()[100], 1);  // it could not leave
    return 0;
  });
}

TEST_F(ConstructTest, other_tensors_under_construction_do_not_stand_in_a_models_way) {
  auto model = session().construct([] { return torch::nn::Linear(torch::nn::LinearOptions(128, 128).bias(false)); });
  const Tensors others = session().construct([] { return numbered_tensors(); });
  session().manage(*model);
  EXPECT_NO_THROW(AdamW(session(), torch::optim::AdamWOptions(1e-3)));
  expect_numbered(others);
}

TEST_F(ConstructTest, a_model_has_the_room_of_one_that_died) {
  config_.nvme.memory = 4 * mib;
  config_.placement.parameters = config_.placement.gradients = Config::Shares{.device = 0, .host = 0, .nvme = 1};
  auto first = session().construct([] { return numbered_tensors(45); });
  const auto second = session().construct([] { return std::make_shared<Model>(); });
  first.clear();
  EXPECT_NO_THROW(session().manage(*second));
}

TEST_F(ConstructTest, what_is_gathered_cannot_come_under_management) {
  const auto model = session().construct([] { return std::make_shared<Model>(); });
  {
    const Gathered view = session().gather({model->layers[2]->weight}, Access::read);
    EXPECT_THAT([&] { session().manage(*model); },
                ::testing::ThrowsMessage<LogicError>(AllOf(HasSubstr("layer2.weight"), HasSubstr("gathered"))));
  }
  session().manage(*model);
}

TEST_F(ConstructTest, what_a_session_left_behind_is_refused_by_the_next) {
  inject({.fault = Fault::io_error, .direction = IoOperation::Direction::read});
  const Tensors left = session().construct([] { return numbered_tensors(); });
  faulty_ = true;
  session_.reset();  // cannot bring them back
  faulty_ = false;
  EXPECT_THROW(left[0].sum(), c10::Error);
  const auto model = session().construct([] { return std::make_shared<Model>(); });
  session().manage(*model);
  EXPECT_THROW(left[0].sum(), c10::Error);
  EXPECT_THROW(session().gather({left[0]}, Access::read), LogicError);
  model->layers[0]->weight.set_data(left[0].view({128, 128}));
  EXPECT_THROW(AdamW(session(), torch::optim::AdamWOptions(1e-3)), LogicError);
}

TEST_F(ConstructTest, a_session_brings_back_what_it_can_when_it_ends) {
  FaultRule first_read{.fault = Fault::io_error, .direction = IoOperation::Direction::read, .nth = 0};
  inject(first_read);
  const Tensors tensors = session().construct([] { return numbered_tensors(); });
  faulty_ = true;
  session_.reset();
  int ordinary = 0;
  for (const at::Tensor& tensor : tensors) {
    try {
      ordinary += tensor.const_data_ptr<float>() != nullptr ? 1 : 0;
    } catch (const c10::Error&) {
    }
  }
  EXPECT_GE(ordinary, tensors_beyond_host - 1);
}

TEST_F(ConstructTest, threads_build_and_manage_beside_each_other) {
  config_.placement.parameters = config_.placement.gradients = Config::Shares{.device = 0, .host = 0, .nvme = 1};
  session();
  std::vector<std::thread> threads;
  std::array<std::shared_ptr<Model>, 2> models;
  for (auto& model : models) {
    threads.emplace_back([&] {
      model = session().construct([] {
        auto made = std::make_shared<Model>();
        const torch::NoGradGuard no_gradients;
        const Tensors parameters = made->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          parameters[i].fill_(static_cast<double>(i));
        }
        return made;
      });
      session().manage(*model);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto& model : models) {
    expect_numbered(model->parameters());
  }
}

/// Builds a model, trains it, builds another while it is managed, and trains both.
Tensors two_models(Session* session) {
  torch::manual_seed(11);
  const auto build = [&] {
    const auto make = [] { return std::make_shared<Model>(); };
    return session != nullptr ? session->construct(make) : make();
  };
  const auto adamw = [&](Model& model) {
    const torch::optim::AdamWOptions options(1e-2);
    if (session == nullptr) {
      return std::make_unique<AdamW>(model.parameters(), options);
    }
    session->manage(model);
    return std::make_unique<AdamW>(*session, AdamW::Groups{torch::optim::OptimizerParamGroup(model.parameters())},
                                   options);
  };
  Tensors results;
  const auto train = [&](Model& model, AdamW& optimizer) {
    for (int i = 0; i < 3; ++i) {
      const at::Tensor loss = model.forward(torch::randn({4, 128})).pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      results.push_back(loss.detach().clone());
    }
  };
  const auto first = build();
  const auto first_optimizer = adamw(*first);
  train(*first, *first_optimizer);
  const auto second = build();
  train(*first, *first_optimizer);
  const auto second_optimizer = adamw(*second);
  train(*first, *first_optimizer);
  train(*second, *second_optimizer);
  for (const auto& model : {first, second}) {
    for (const at::Tensor& parameter : model->parameters()) {
      results.push_back(parameter.detach().clone());
    }
  }
  return results;
}

TEST_F(ConstructTest, a_model_is_built_while_another_trains_to_unmanaged_bits) {
  const Tensors expected = two_models(nullptr);
  const Config::Shares on_nvme{.device = 0, .host = 0, .nvme = 1};
  config_.placement.parameters = config_.placement.gradients = config_.placement.optimizer = on_nvme;
  const Tensors actual = two_models(&session());
  expect_same_bits(actual, expected);
  EXPECT_LE(usage().peak(Tier::host), config_.host.memory);
}

}  // namespace
}  // namespace terrace::testing
