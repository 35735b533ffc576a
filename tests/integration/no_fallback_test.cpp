// Ops that are refused memory, and would rather go on without.

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <torch/library.h>

#include "tests/integration/message_of.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Keeps the warnings that reach it.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

constexpr std::int64_t too_many = std::int64_t{1} << 30;  // elements

/// Warns and goes on where there is no memory, as LibTorch's batched products do in bf16.
at::Tensor makes_do(std::int64_t elements) {
  try {
    return at::empty({elements});
  } catch (const std::exception& error) {
    TORCH_WARN("no memory, switching to another way:", error.what());
    return at::empty({1});
  }
}

/// Warns of an error of its own, and goes on.
at::Tensor complains(const at::Tensor& x) {
  try {
    TORCH_CHECK(false, "not today");
  } catch (const std::exception& error) {
    TORCH_WARN("switching to another way: ", error.what());
  }
  return x.clone();
}

/// Is refused memory under a handler of its own, and later warns of something else.
at::Tensor recovers() {
  Warnings own;
  {
    const c10::WarningUtils::WarningHandlerGuard heard(&own);
    try {
      return at::empty({too_many});
    } catch (const c10::OutOfMemoryError&) {
    }
  }
  try {
    return at::empty({too_many});
  } catch (const c10::OutOfMemoryError&) {
  }
  try {
    throw std::runtime_error("could do with less");
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
  return at::empty({1});
}

class NoFallback : public ::testing::Test {
 protected:
  NoFallback() {
    library_.def("makes_do(int elements) -> Tensor");
    library_.def("complains(Tensor x) -> Tensor");
    library_.def("recovers() -> Tensor");
    library_.impl("makes_do", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &makes_do));
    library_.impl("recovers", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &recovers));
    library_.impl("complains", torch::dispatch(c10::kCPU, &complains));
  }

  static at::Tensor make_do(std::int64_t elements) {
    return op("terrace_test::makes_do").typed<at::Tensor(std::int64_t)>().call(elements);
  }
  static at::Tensor complain(const at::Tensor& x) {
    return op("terrace_test::complains").typed<at::Tensor(const at::Tensor&)>().call(x);
  }
  static at::Tensor recover() { return op("terrace_test::recovers").typed<at::Tensor()>().call(); }
  static c10::OperatorHandle op(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

  torch::Library library_{torch::Library::DEF, "terrace_test", std::nullopt, __FILE__, __LINE__};
  Warnings warnings_;
  c10::WarningUtils::WarningHandlerGuard heard_{&warnings_};
};

TEST_F(NoFallback, an_op_that_is_refused_memory_fails_though_it_would_go_on_without) {
  Session session(tight_config());
  const std::string refusal = message_of<c10::OutOfMemoryError>([] { make_do(too_many); });
  EXPECT_THAT(refusal, HasSubstr("device.memory"));
  EXPECT_TRUE(last_error_as<OutOfMemory>(session).has_value());
  EXPECT_THAT(warnings_.texts, ElementsAre());
  EXPECT_EQ(make_do(4).numel(), 4);
}

TEST_F(NoFallback, warnings_reach_who_asked_for_them_but_for_those_of_refused_ops) {
  Session session(tight_config());
  EXPECT_THROW(make_do(too_many), c10::OutOfMemoryError);
  complain(at::ones({1}));
  EXPECT_THROW(at::empty({too_many}), c10::OutOfMemoryError);
  complain(at::ones({1}));
  EXPECT_THAT(warnings_.texts, ElementsAre(HasSubstr("not today"), HasSubstr("not today")));
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &warnings_);
}

TEST_F(NoFallback, a_handler_of_the_programs_own_is_the_same_after_a_refusal_wherever_that_is) {
  Session session(tight_config());
  {
    RECORD_FUNCTION("a step", c10::ArrayRef<const c10::IValue>{});
    Warnings inner;
    {
      const c10::WarningUtils::WarningHandlerGuard heard(&inner);
      EXPECT_THROW(at::empty({too_many}), c10::OutOfMemoryError);
    }
    EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &warnings_);
    EXPECT_THROW(at::empty({too_many}), c10::OutOfMemoryError);
    try {
      TORCH_CHECK(false, "of the program");
    } catch (const c10::Error& error) {
      TORCH_WARN(error.what());
    }
  }
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &warnings_);
  EXPECT_THAT(warnings_.texts, ElementsAre(HasSubstr("of the program")));
}

TEST_F(NoFallback, an_op_with_a_handler_of_its_own_leaves_the_programs_in_place) {
  Session session(tight_config());
  EXPECT_EQ(recover().numel(), 1);
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &warnings_);
  complain(at::ones({1}));
  EXPECT_THAT(warnings_.texts, ElementsAre(HasSubstr("could do with less"), HasSubstr("not today")));
}

TEST_F(NoFallback, a_batched_product_in_bf16_that_is_refused_memory_leaves_one_dnn_on) {
  Config config = tight_config();
  config.device.chunks = std::nullopt;
  config.placement.activations = "keep";
  const auto program = [&](std::uint64_t device_bytes) -> std::uint64_t {
    config.device.memory = device_bytes;
    Session session(config);
    torch::nn::ParameterList weights;
    weights->append(torch::ones({96, 20, 16}, at::kBFloat16));
    session.manage(*weights);
    const torch::NoGradGuard no_grad;
    const at::Tensor x = torch::ones({96, 20, 16}, at::kBFloat16);
    for (int i = 0; i < 3; ++i) {
      torch::bmm(x, weights[0].transpose(1, 2));
    }
    return session.memory_usage().needed(Tier::device);
  };
  const std::uint64_t needed = program(4 << 20);
  EXPECT_THROW(program(needed - 1), std::exception);
  EXPECT_TRUE(at::globalContext().userEnabledMkldnn());
}

}  // namespace
}  // namespace terrace::testing
