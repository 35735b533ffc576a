// When saved tensors leave the device: within a backward that saves, beside another graph's, of many that are held, and
// where chunks may not have more of the device; and that errors and changes in backward are told as LibTorch tells
// them.

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/message_of.h"
#include "tests/integration/small_device.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t KiB = 1 << 10;
constexpr std::int64_t MiB = 1 << 20;

using LeavingActivations = SmallDeviceTest;

std::uint64_t moved(const Session& session) {
  return session.memory_usage().moved(Link::device_to_host, Kind::activation);
}

/// An op, before which what nobody holds leaves.
void some_op() { torch::zeros({1}).add_(1); }

}  // namespace

TEST_P(LeavingActivations, leave_within_the_backward_that_saves_them) {
  const auto second_gradient = [] {
    const at::Tensor x = wide_input();
    const at::Tensor seed = torch::ones_like(x).requires_grad_();
    const at::Tensor gradient =
        torch::autograd::grad({twenty_times_tanh(x)}, {x}, {seed}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({gradient.square().sum()}, {seed})[0].clone();
  };
  const at::Tensor expected = second_gradient();
  {
    Config kept = config();
    kept.placement.activations = "keep";
    const Session session(kept);
    EXPECT_THROW(second_gradient(), c10::Error) << "the device holds all of it: the test proves little";
  }
  const Session session(config());
  EXPECT_TRUE(at::equal(second_gradient(), expected));
}

TEST_P(LeavingActivations, leave_after_the_backward_of_another_graph_during_which_they_were_held) {
  const Session session(config());
  std::vector<at::Tensor> held{wide_input()};
  for (int i = 0; i < 6; ++i) held.push_back(held.back().tanh());
  const at::Tensor loss = held.back().sum();
  const at::Tensor other = torch::ones({1}).requires_grad_();
  (other * other).backward();
  const at::Tensor input = held.front();
  held.clear();
  some_op();
  EXPECT_GE(session.memory_usage().now(home(), Kind::activation), static_cast<std::uint64_t>(6 * MiB));
  loss.backward();
  EXPECT_TRUE(input.grad().defined());
}

TEST_P(LeavingActivations, of_many_that_are_held_leave_at_once_where_their_room_is_wanted) {
  const Session session(config());
  at::Tensor x = torch::linspace(-1, 1, 16 * KiB).requires_grad_();
  const at::Tensor input = x;
  std::vector<at::Tensor> held;
  for (int i = 0; i < 120; ++i) {
    x = x.tanh();
    held.push_back(x);  // 7.5 MiB
  }
  const at::Tensor loss = x.sum();
  x = at::Tensor();
  held.clear();
  EXPECT_EQ(torch::empty(9 * MiB, at::kByte).numel(), 9 * MiB);
  loss.backward();
  EXPECT_TRUE(input.grad().defined());
}

TEST_P(LeavingActivations, of_many_that_are_held_leave_in_turn) {
  const Session session(config(64 * MiB));
  at::Tensor x = torch::linspace(-1, 1, 16 * KiB).requires_grad_();
  std::vector<at::Tensor> held;
  for (int i = 0; i < 120; ++i) {
    x = x.tanh();
    held.push_back(x);
  }
  const at::Tensor loss = x.sum();
  held.erase(held.begin(), held.begin() + 100);
  const auto resting = [&] { return session.memory_usage().now(home(), Kind::activation); };
  for (int i = 0; i < 20; ++i) some_op();
  EXPECT_GE(resting(), static_cast<std::uint64_t>(100 * 64 * KiB));
}

TEST_P(LeavingActivations, stay_where_chunks_may_have_no_more_of_the_device) {
  Config narrow = config(64 * MiB);
  narrow.device.chunks = 2 * MiB;
  const Session session(narrow);
  const at::Tensor x = wide_input();
  const at::Tensor loss = chain(x);
  EXPECT_EQ(moved(session), 0u) << "there is room for them";
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_P(LeavingActivations, leave_where_chunks_may_have_no_more_and_their_room_is_wanted) {
  const at::Tensor x = wide_input();
  chain(x).backward();
  const at::Tensor expected = x.grad().clone();
  Config narrow = config(16 * MiB);
  narrow.device.chunks = 4 * MiB;
  const Session session(narrow);
  const at::Tensor y = wide_input();
  chain(y).backward();
  EXPECT_GT(moved(session), 0u);
  EXPECT_TRUE(at::equal(y.grad(), expected));
}

namespace {

/// 6 MiB that nobody holds any more, without an op since.
at::Tensor graph_of_many_that_were_held() {
  at::Tensor x = torch::linspace(-1, 1, 16 * KiB).requires_grad_();
  std::vector<at::Tensor> held;
  for (int i = 0; i < 96; ++i) {
    x = x.tanh();
    held.push_back(x);
  }
  return x.sum();
}

}  // namespace

TEST_P(LeavingActivations, leave_for_what_the_backward_of_another_graph_brings_back) {
  const Session session(config());
  const at::Tensor x = wide_input();
  const at::Tensor loss = chain(x);
  torch::empty(std::int64_t{device_bytes} - 3 * MiB / 2, at::kByte);  // for which all of that has left
  const at::Tensor other = graph_of_many_that_were_held();
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_P(LeavingActivations, leave_for_a_parameter_that_an_op_or_the_program_wants) {
  Session session(config());
  torch::nn::Linear wide(1024, 768);  // 3 MiB
  session.manage(*wide);
  const auto has_left = [] { torch::empty(std::int64_t{device_bytes} - MiB / 2, at::kByte); };
  has_left();
  const at::Tensor first = graph_of_many_that_were_held();
  EXPECT_EQ(wide->weight.sum().numel(), 1);
  has_left();
  const at::Tensor second = graph_of_many_that_were_held();
  const auto view = session.gather({wide->weight}, Access::read);
  EXPECT_NE(wide->weight.data_ptr(), nullptr);
}

TEST_P(LeavingActivations, leave_for_other_threads_than_that_which_saved_them) {
  const Session session(config());
  for (const bool has_ended : {false, true}) {
    at::Tensor loss;
    std::promise<void> saved, done;
    std::thread thread([&] {
      loss = graph_of_many_that_were_held();
      saved.set_value();
      if (!has_ended) done.get_future().wait();
    });
    saved.get_future().wait();
    if (has_ended) thread.join();
    EXPECT_EQ(torch::empty(8 * MiB, at::kByte).numel(), 8 * MiB) << has_ended;
    if (!has_ended) {
      done.set_value();
      thread.join();
    }
    loss.backward();
  }
}

namespace {

/// Computes when its thread ends.
struct ComputesLate {
  at::Tensor x;
  std::vector<at::Tensor> held;
  at::Tensor* result = nullptr;

  ComputesLate() = default;
  ~ComputesLate() {
    held.clear();
    for (int i = 0; i < 40; ++i) x = x.tanh();
    *result = x.sum();
  }
  ComputesLate(const ComputesLate&) = delete;
  ComputesLate& operator=(const ComputesLate&) = delete;
};

}  // namespace

TEST_P(LeavingActivations, leave_and_come_back_where_a_thread_computes_as_it_ends) {
  const auto run = [] {
    const at::Tensor x = torch::linspace(-1, 1, 64 * KiB).requires_grad_();
    at::Tensor loss;
    std::thread([&] {
      static thread_local ComputesLate late;  // ends after what ops of the thread have made
      late.result = &loss;
      late.x = x;
      for (int i = 0; i < 4; ++i) {
        late.x = late.x.tanh();
        late.held.push_back(late.x);
      }
    }).join();
    EXPECT_EQ(torch::empty(7 * MiB, at::kByte).numel(), 7 * MiB);
    loss.backward();
    return x.grad().clone();
  };
  const at::Tensor expected = run();
  const Session session(config());
  EXPECT_TRUE(at::equal(run(), expected));
}

namespace {

/// Its backward changes what forward has saved.
struct ChangesItsInput : torch::autograd::Function<ChangesItsInput> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    context->get_saved_variables()[0].mul_(2);
    return {gradients[0] * 2};
  }
};

}  // namespace

TEST_P(LeavingActivations, changed_in_place_as_backward_was_given_them_are_refused_as_LibTorch_does) {
  const auto run = [](std::int64_t elements) {
    const at::Tensor input = torch::linspace(-1, 1, elements).requires_grad_();
    at::Tensor x = input * 1;
    const at::Tensor a = x.sin();  // needs x in backward, after the other has changed it
    const at::Tensor loss = (a + ChangesItsInput::apply(x)).sum();
    x = at::Tensor();
    some_op();
    loss.backward();
  };
  const auto is_refused = [&](std::int64_t elements) {
    EXPECT_THAT(message_of<c10::Error>([&] { run(elements); }), HasSubstr("modified by an inplace operation"))
        << elements;
  };
  is_refused(16);
  const Session session(config());
  is_refused(16);
  is_refused(256 * KiB);
}

TEST_P(LeavingActivations, that_are_views_of_a_base_which_changes_in_place_are_refused_as_LibTorch_does) {
  const Session session(config());
  const at::Tensor x = wide_input();
  const auto on_device = [&] {
    return session.memory_usage().now(Tier::device, Kind::activation) +
           session.memory_usage().now(Tier::device, Kind::other);
  };
  const std::uint64_t before = on_device();
  {
    const at::Tensor base = x * 1;
    at::Tensor loss = base.view({512, 512}).t().square().sum();  // saves the view
    loss = loss + chain(x);                                      // others leave meanwhile
    base.add_(1);
    EXPECT_GT(moved(session), 0u);
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
  }
  x.mutable_grad() = at::Tensor();
  torch::empty(std::int64_t{device_bytes} - 3 * MiB / 2,
               at::kByte);  // for which all that was on its way has to be there
  EXPECT_EQ(on_device(), before);
}

TEST_P(LeavingActivations, come_back_for_no_longer_than_a_backward_that_throws) {
  const Session session(config(64 * MiB));
  const auto held = [&](Tier tier) {
    return session.memory_usage().now(tier, Kind::activation) + session.memory_usage().now(tier, Kind::other);
  };
  const at::Tensor x = wide_input();
  const std::uint64_t device_before = held(Tier::device);
  {
    at::Tensor y = x.tanh().tanh();
    y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("enough"); });
    const at::Tensor loss = chain(y);
    y = at::Tensor();
    EXPECT_THROW(loss.backward(), std::runtime_error);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto left = [&] {
    return held(Tier::device) - device_before + session.memory_usage().now(Tier::host, Kind::activation) +
           session.memory_usage().now(Tier::nvme, Kind::activation);
  };
  while (left() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // what is on its way goes when it is there
  }
  EXPECT_EQ(left(), 0u);
}

TEST_P(LeavingActivations, that_find_no_room_in_backward_are_refused_as_operands_are) {
  Session session(config());
  const at::Tensor x = wide_input();
  const at::Tensor loss = chain(x);
  some_op();
  std::vector<at::Tensor> filling;  // all of the device, by and by
  for (std::int64_t bytes = 4 * MiB; bytes >= 128 * KiB; bytes /= 2) {
    try {
      for (;;) filling.push_back(torch::empty(bytes, at::kByte));
    } catch (const c10::OutOfMemoryError&) {
    }
  }
  EXPECT_THAT(message_of<c10::OutOfMemoryError>([&] { loss.backward(); }), HasSubstr("device"));
  EXPECT_THROW(std::rethrow_exception(session.last_error()), OutOfMemory);
  filling.clear();
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
}

INSTANTIATE_TEST_SUITE_P(Tiers, LeavingActivations, ::testing::Values("host", "nvme"),
                         [](const auto& tier) { return tier.param; });

}  // namespace terrace::testing
