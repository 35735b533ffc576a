// Threads that use one session at once: each trains or evaluates what is its own, and gets the bits that it would
// alone.

#include <atomic>
#include <functional>
#include <thread>

#include "integration/session_state.h"
#include "memory/access_stream.h"
#include "tests/base/temporary_folder.h"
#include "tests/integration/mlp.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

constexpr int steps = 10;

/// A model with the data that it is to see. LibTorch's generator belongs to the thread that makes it.
struct Pupil {
  explicit Pupil(Session* session, std::uint64_t seed) {
    torch::manual_seed(seed);
    const auto build = [] { return std::make_shared<Mlp>(6, tight_width); };
    model = session != nullptr ? session->construct(build) : build();
    for (int step = 0; step < steps; ++step) {
      batches.push_back(torch::randn({8, tight_width}));
    }
  }

  AdamW::Groups groups() const { return {torch::optim::OptimizerParamGroup(model->parameters())}; }

  /// Losses and, at the end, parameters are kept as copies.
  void train(AdamW& optimizer) {
    for (const at::Tensor& batch : batches) {
      const at::Tensor loss = model->forward(batch);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      seen.push_back(loss.detach().clone());
    }
    for (const at::Tensor& parameter : model->parameters()) {
      seen.push_back(parameter.detach().clone());
    }
  }

  void evaluate() {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& batch : batches) {
      seen.push_back(model->features(batch));
    }
  }

  std::shared_ptr<Mlp> model;
  std::vector<at::Tensor> batches;
  std::vector<at::Tensor> seen;
};

std::vector<at::Tensor> seen_unmanaged(std::uint64_t seed, bool trained = true) {
  at::set_num_threads(1);
  Pupil pupil(nullptr, seed);
  if (trained) {
    AdamW optimizer(pupil.groups(), AdamW::Options(1e-2));
    pupil.train(optimizer);
  } else {
    pupil.evaluate();
  }
  return pupil.seen;
}

/// Runs them at once. What one throws fails the test.
void at_once(std::vector<std::function<void()>> all) {
  std::atomic<int> missing = static_cast<int>(all.size());
  std::vector<std::thread> threads;
  for (auto& one : all) {
    threads.emplace_back([&missing, one = std::move(one)] {
      at::set_num_threads(1);
      for (--missing; missing > 0;) {
        std::this_thread::yield();
      }
      EXPECT_NO_THROW(one());
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void expect_sound_books(Session& session) {
  session.synchronize();
  EXPECT_NO_THROW(session.state()->memory().stream().inspect([](const Policy& policy) { policy.check_invariants(); }));
}

/// Two ops of two operands fit the device at once, and a fifth of each model.
Config for_two() {
  Config config = tight_config();
  config.device.chunks = 6 * tight_chunk_bytes;
  return config;
}

class Threads : public ::testing::TestWithParam<const char*> {
 protected:
  Config config() const {
    Config made = for_two();
    if (GetParam() == std::string("nvme")) {
      made.host.memory = 24 * tight_chunk_bytes;
      made.timeline.memory = 0;
      made.nvme.paths = {folder_.path()};
      made.nvme.memory = 16 << 20;
      made.placement.parameters = made.placement.gradients = made.placement.optimizer = Config::Shares{.nvme = 1};
    }
    return made;
  }

  void expect_bytes_moved(const Session& session) const {
    EXPECT_GT(session.memory_usage().moved(Link::host_to_device), 20u * steps * tight_chunk_bytes);
    if (GetParam() == std::string("nvme")) {
      EXPECT_GT(session.memory_usage().moved(Link::nvme_to_host), 0u);
    }
  }

 private:
  const TemporaryFolder folder_;
};

}  // namespace

INSTANTIATE_TEST_SUITE_P(AtHomeOn, Threads, ::testing::Values("host", "nvme"),
                         [](const auto& home) { return std::string(home.param); });

TEST_P(Threads, two_that_train_a_model_each_get_the_bits_of_plain_libtorch) {
  const auto expected_first = seen_unmanaged(1);
  const auto expected_second = seen_unmanaged(2);
  Session session(config());
  Pupil first(&session, 1);
  session.manage(*first.model);
  Pupil second(&session, 2);
  session.manage(*second.model);
  at_once({[&] {
             AdamW optimizer(session, first.groups(), AdamW::Options(1e-2));
             first.train(optimizer);
           },
           [&] {
             AdamW optimizer(session, second.groups(), AdamW::Options(1e-2));
             second.train(optimizer);
           }});
  expect_same_bits(first.seen, expected_first);
  expect_same_bits(second.seen, expected_second);
  expect_bytes_moved(session);
  expect_sound_books(session);
}

TEST_P(Threads, one_that_evaluates_beside_one_that_trains_leaves_its_bits_alone) {
  const auto expected_trained = seen_unmanaged(1);
  const auto expected_evaluated = seen_unmanaged(2, /*trained=*/false);
  Session session(config());
  Pupil trained(&session, 1);
  session.manage(*trained.model);
  Pupil evaluated(&session, 2);
  session.manage(*evaluated.model);
  AdamW optimizer(session, AdamW::Options(1e-2));  // over both: the second's have no gradients
  at_once({[&] { trained.train(optimizer); },
           [&] {
             for (int i = 0; i < 4; ++i) {
               evaluated.seen.clear();
               evaluated.evaluate();
             }
           }});
  expect_same_bits(trained.seen, expected_trained);
  expect_same_bits(evaluated.seen, expected_evaluated);
  expect_bytes_moved(session);
  expect_sound_books(session);
}

TEST_P(Threads, one_whose_models_die_disturbs_none_that_trains) {
  const auto expected_first = seen_unmanaged(1);
  const auto expected_others = seen_unmanaged(2);
  Session session(config());
  Pupil first(&session, 1);
  session.manage(*first.model);
  at_once({[&] {
             AdamW optimizer(session, first.groups(), AdamW::Options(1e-2));
             first.train(optimizer);
           },
           [&] {
             for (int i = 0; i < 4; ++i) {
               Pupil other(&session, 2);
               session.manage(*other.model);
               AdamW optimizer(session, other.groups(), AdamW::Options(1e-2));
               other.train(optimizer);
               expect_same_bits(other.seen, expected_others);
             }
           }});
  expect_same_bits(first.seen, expected_first);
  expect_bytes_moved(session);
  expect_sound_books(session);
}

TEST_P(Threads, one_that_brings_its_model_under_management_disturbs_none_that_trains) {
  const auto expected_first = seen_unmanaged(1);
  const auto expected_second = seen_unmanaged(2);
  Session session(config());
  Pupil first(&session, 1);
  session.manage(*first.model);
  Pupil second(&session, 2);
  at_once({[&] {
             AdamW optimizer(session, first.groups(), AdamW::Options(1e-2));
             first.train(optimizer);
           },
           [&] {
             session.manage(*second.model);
             AdamW optimizer(session, second.groups(), AdamW::Options(1e-2));
             second.train(optimizer);
           }});
  expect_same_bits(first.seen, expected_first);
  expect_same_bits(second.seen, expected_second);
  expect_sound_books(session);
}

TEST_P(Threads, two_may_evaluate_one_model) {
  const auto expected = seen_unmanaged(1, /*trained=*/false);
  Session session(config());
  Pupil first(&session, 1);
  session.manage(*first.model);
  Pupil second = first;
  at_once({[&] { first.evaluate(); }, [&] { second.evaluate(); }});
  expect_same_bits(first.seen, expected);
  expect_same_bits(second.seen, expected);
  expect_sound_books(session);
}

TEST_P(Threads, two_that_train_one_model_do_no_more_harm_than_without_a_session) {
  {
    Session session(config());
    Pupil pupil(&session, 1);
    session.manage(*pupil.model);
    AdamW optimizer(session, AdamW::Options(1e-2));
    const auto train = [&] {
      for (const at::Tensor& batch : pupil.batches) {
        try {
          pupil.model->forward(batch).backward();
          optimizer.step();
        } catch (const std::exception&) {
          // A graph whose parameters the other thread has updated, or a chunk that it holds.
        }
      }
    };
    at_once({train, train});
    expect_sound_books(session);
    optimizer.zero_grad();
    EXPECT_NO_THROW(pupil.train(optimizer)) << "by one thread";
    EXPECT_TRUE(pupil.seen.back().isfinite().all().item<bool>());
  }
  EXPECT_NO_THROW(Session next(config()));
}

TEST(ThreadsOfOneSession, gradients_of_one_model_from_two_threads_add_up) {
  Session session(for_two());
  Pupil pupil(&session, 1);
  session.manage(*pupil.model);
  constexpr int rounds = 30;
  const auto backward = [&] {
    for (int i = 0; i < rounds; ++i) {
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& parameter : pupil.model->parameters()) {
        loss = loss + parameter.sum();
      }
      loss.backward();
    }
  };
  at_once({backward, backward});
  for (const at::Tensor& parameter : pupil.model->parameters()) {
    EXPECT_TRUE(parameter.grad().eq(2 * rounds).all().item<bool>());
  }
}

TEST(ThreadsOfOneSession, a_view_that_another_thread_holds_makes_step_throw_with_the_parameters_name) {
  Session session(for_two());
  Pupil pupil(&session, 1);
  session.manage(*pupil.model);
  AdamW optimizer(session, AdamW::Options(1e-2));
  pupil.model->forward(pupil.batches[0]).backward();
  std::optional<Gathered> view;
  at_once({[&] { view.emplace(session.gather({pupil.model->layers[3]->weight}, Access::read)); }});
  expect_logic_error(HasSubstr("'layer3.weight' is gathered"), [&] { optimizer.step(); });
  at_once({[&] { view.reset(); }});
  EXPECT_NO_THROW(optimizer.step());
}

TEST(ThreadsOfOneSession, a_view_of_one_model_does_not_stop_the_step_of_another) {
  const auto expected = seen_unmanaged(1);
  Session session(for_two());
  Pupil trained(&session, 1);
  session.manage(*trained.model);
  Pupil looked_at(&session, 2);
  session.manage(*looked_at.model);
  AdamW optimizer(session, AdamW::Options(1e-2));
  std::atomic<bool> done = false;
  at_once({[&] {
             trained.train(optimizer);
             done = true;
           },
           [&] {
             while (!done) {
               for (auto& layer : looked_at.model->layers) {
                 const Gathered view = session.gather(std::vector<at::Tensor>{layer->weight}, Access::read);
                 EXPECT_NE(view.tensors()[0].const_data_ptr(), nullptr);
               }
             }
           }});
  expect_same_bits(trained.seen, expected);
  expect_sound_books(session);
}

TEST(ThreadsOfOneSession, a_hook_of_the_program_may_step_while_another_thread_does) {
  struct StepsWhenLast : torch::autograd::PostAccumulateGradHook {
    StepsWhenLast(AdamW& the_optimizer) : optimizer(the_optimizer) {}
    void operator()(const torch::autograd::Variable&) override { optimizer.step(); }
    AdamW& optimizer;
  };
  const auto expected = seen_unmanaged(2);
  Session session(for_two());
  Pupil first(&session, 1);
  session.manage(*first.model);
  Pupil second(&session, 2);
  session.manage(*second.model);
  AdamW of_first(session, first.groups(), AdamW::Options(1e-2));
  AdamW of_second(session, second.groups(), AdamW::Options(1e-2));
  at::Tensor& weight = first.model->layers[0]->weight;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<StepsWhenLast>(of_first));
  at_once({[&] {
             for (const at::Tensor& batch : first.batches) {
               first.model->forward(batch).backward();
               of_first.zero_grad();
             }
           },
           [&] { second.train(of_second); }});
  torch::autograd::impl::set_post_acc_grad_hooks(weight, nullptr);  // it uses a local
  expect_same_bits(second.seen, expected);
  expect_sound_books(session);
}

TEST(ThreadsOfOneSession, operands_of_two_that_do_not_fit_together_are_out_of_memory_and_nobody_waits) {
  Config config = for_two();
  config.device.chunks = 3 * tight_chunk_bytes;
  Session session(config);
  Pupil pupil(&session, 1);
  session.manage(*pupil.model);
  std::optional<Gathered> view;
  at_once({[&] {
    view.emplace(session.gather({pupil.model->layers[0]->weight, pupil.model->layers[1]->weight}, Access::read));
  }});
  EXPECT_THROW(pupil.model->layers[2](pupil.batches[0]), c10::Error);  // of two chunks
  const auto error = last_error_as<OutOfMemory>(session);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->hint(), HasSubstr("device.chunks"));
  view.reset();
  EXPECT_NO_THROW(pupil.model->layers[2](pupil.batches[0]));
}

}  // namespace terrace::testing
