// Ops that are refused their operands, and ops that LibTorch forgets.

#include <future>
#include <string>
#include <thread>

#include <torch/library.h>

#include "tests/integration/message_of.h"
#include "tests/integration/mlp.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

/// An op that waits before it reads its operands. It is called once after each `reset`.
struct PatientOp {
  static inline std::promise<void> has_begun;
  static inline std::promise<void> may_go_on;

  static void reset() {
    has_begun = {};
    may_go_on = {};
  }
  static at::Tensor run(at::TensorList operands) {
    has_begun.set_value();
    may_go_on.get_future().wait();
    double sum = 0;
    for (const at::Tensor& operand : operands) {
      sum += *operand.const_data_ptr<float>();
    }
    return at::scalar_tensor(sum);
  }
};

TEST(Interceptor, has_no_thread_open_what_an_op_was_refused_that_runs_still) {
  PatientOp::reset();
  torch::Library library(torch::Library::DEF, "terrace_test", std::nullopt, __FILE__, __LINE__);
  library.def("patient(Tensor[] operands) -> Tensor");
  library.impl("patient", torch::dispatch(c10::kCPU, &PatientOp::run));
  const auto patient =
      c10::Dispatcher::singleton().findSchemaOrThrow("terrace_test::patient", "").typed<at::Tensor(at::TensorList)>();
  Session session(tight_config());
  const auto model = std::make_shared<Mlp>(4, tight_width);
  session.manage(*model);
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> weights;
  for (const auto& layer : model->layers) {
    weights.push_back(layer->weight);
  }
  std::string refusal;
  std::thread refused([&] {
    const torch::NoGradGuard no_grad_here;
    refusal = message_of<c10::Error>([&] { patient.call(weights); });  // four chunks, where there is room for three
  });
  PatientOp::has_begun.get_future().wait();
  EXPECT_THAT(message_of<c10::Error>([&] { weights[0].sum(); }), HasSubstr("could not be brought to the device"));
  EXPECT_TRUE(last_error_as<OutOfMemory>(session).has_value());
  EXPECT_THROW(session.gather({weights[0]}, Access::read), OutOfMemory);
  PatientOp::may_go_on.set_value();
  refused.join();
  EXPECT_THAT(refusal, HasSubstr("could not be brought to the device"));
  EXPECT_NO_THROW(weights[0].sum());
}

TEST(Interceptor, asks_anew_what_an_op_does_that_has_the_name_of_one_that_is_gone) {
  const auto with_op = [](const char* arguments, auto kernel, const auto& call) {
    torch::Library library(torch::Library::DEF, "terrace_test", std::nullopt, __FILE__, __LINE__);
    const std::string name = "a_name_that_is_long_enough_for_the_heap";
    library.def((name + arguments).c_str());
    library.impl(name.c_str(), torch::dispatch(c10::kCPU, kernel));
    call(c10::Dispatcher::singleton().findSchemaOrThrow(("terrace_test::" + name).c_str(), ""));
  };
  Session session(tight_config());
  torch::nn::Linear linear(tight_width, tight_width);
  session.manage(*linear);
  const torch::NoGradGuard no_grad;
  linear->bias.zero_();
  for (int i = 0; i < 20; ++i) {
    with_op(
        "(Tensor(a) x) -> Tensor(a)", [](const at::Tensor& x) { return x.view(-1); },
        [&](const auto& op) { op.template typed<at::Tensor(const at::Tensor&)>().call(linear->bias); });
    with_op(
        "(Tensor(a!) x) -> ()", [](const at::Tensor& x) { *x.mutable_data_ptr<float>() += 1; },
        [&](const auto& op) { op.template typed<void(const at::Tensor&)>().call(linear->bias); });
  }
  EXPECT_EQ(linear->bias[0].item<float>(), 20);
}

}  // namespace
}  // namespace terrace::testing
