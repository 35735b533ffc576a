// Programs that leave the schedule that was recorded of them: they go on with the bits of unmanaged, and once they are
// back on a schedule that was seen before, so are their fetches.

#include <algorithm>
#include <cstdio>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {
namespace {

/// y = x * weight. LibTorch runs it without a graph, as it does an evaluation.
struct OwnScale : torch::autograd::Function<OwnScale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(at::IntArrayRef{0, 1})};
  }
};

/// Whether, and by what, a layer's output is scaled.
enum class Scaling : std::uint8_t { none, op, own_function };

enum class Departure : std::uint8_t { none, skipped_layer, other_length, evaluation, exception };
constexpr const char* departure_names[] = {"none", "skipped_layer", "other_length", "evaluation", "exception"};

constexpr int steps = 20;
constexpr int departs_at = 6;
constexpr int back_at = departs_at + 1 + 3;  // after three steps of the schedule that was seen before

struct Way {
  Departure departure;
  const char* update;
  bool uses_nvme;
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << departure_names[static_cast<std::size_t>(way.departure)] << "_" << way.update
       << (way.uses_nvme ? "_nvme" : "_host");
}

SmallGptShape shape() {
  SmallGptShape shape;
  shape.width = 128;
  return shape;
}

struct Outcome {
  std::vector<float> losses;
  std::vector<at::Tensor> parameters;
  std::vector<std::uint64_t> fetches;  // on demand, by step
};

Config config_for(const Way& way, const std::filesystem::path& folder) {
  Config config = Config::parse(way.uses_nvme ? R"([placement]
parameters={host=0.5, nvme=0.5}
gradients={host=0.5, nvme=0.5}
optimizer={host=0.5, nvme=0.5}
)"
                                              : "",
                                "off_schedule", {"nvme.paths=[\"" + folder.string() + "\"]"});
  config.device.memory = 4 << 20;
  config.device.chunks = 960 << 10;  // of 3 MiB of parameters
  config.host.memory = way.uses_nvme ? 10 << 20 : 24 << 20;
  config.nvme.memory = 20 << 20;
  config.placement.chunk = 64 << 10;
  config.optimizer.update = way.update;
  config.log.level = LogLevel::error;
  return config;
}

at::Tensor forward(SmallGpt& model, const at::Tensor& tokens, const at::Tensor& targets, Departure departure,
                   Scaling scaling) {
  at::Tensor x = model.embedding(tokens) + model.position(torch::arange(tokens.size(1)));
  for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
    if (layer == 2 && departure == Departure::skipped_layer) {
      continue;
    }
    if (layer == 2 && departure == Departure::exception) {
      throw std::runtime_error("mid-forward");
    }
    x = model.layers[layer]->forward(x);
    if (scaling != Scaling::none) {
      const at::Tensor& weight = model.layers[layer]->norm2->weight;
      x = scaling == Scaling::op ? x * weight : OwnScale::apply(x, weight);
    }
  }
  const at::Tensor logits = torch::linear(model.norm(x), model.embedding->weight);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

Outcome train(Departure departure, const std::optional<Config>& config, Scaling scaling = Scaling::none) {
  // As many threads as cores: no update runs beside the program, so that its accesses come in a fixed order.
  at::set_num_threads(static_cast<int>(std::thread::hardware_concurrency()));
  torch::manual_seed(7);
  std::optional<Session> session;
  if (config) {
    session.emplace(*config);
  }
  const auto build = [] { return std::make_shared<SmallGpt>(shape()); };
  const std::shared_ptr<SmallGpt> model = session ? session->construct(build) : build();
  const auto options = torch::optim::AdamWOptions(3e-3).weight_decay(0.1);
  std::optional<AdamW> optimizer;
  if (session) {
    session->manage(*model);
    optimizer.emplace(*session, options);
  } else {
    optimizer.emplace(model->parameters(), options);
  }
  optimizer->max_gradient_norm(0.5);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  Outcome outcome;
  std::uint64_t fetches = 0;
  for (int step = 0; step < steps; ++step) {
    const Departure now = step == departs_at ? departure : Departure::none;
    const std::int64_t length = now == Departure::other_length ? shape().sequence / 2 : shape().sequence;
    const auto batch = torch::randint(shape().vocabulary, {2, shape().sequence + 1}, generator, torch::kLong);
    const at::Tensor tokens = batch.slice(1, 0, length);
    const at::Tensor targets = batch.slice(1, 1, length + 1);
    if (now == Departure::evaluation) {
      const at::NoGradGuard no_grad;
      outcome.losses.push_back(forward(*model, tokens, targets, now, scaling).item<float>());
    }
    try {
      const at::Tensor loss = forward(*model, tokens, targets, now, scaling);
      loss.backward();
      optimizer->step();
      outcome.losses.push_back(loss.item<float>());
    } catch (const std::runtime_error&) {
      EXPECT_EQ(now, Departure::exception);
    }
    optimizer->zero_grad();
    if (session) {
      const std::uint64_t before = std::exchange(fetches, session->memory_usage().demand_fetches);
      outcome.fetches.push_back(fetches - before);
    }
  }
  optimizer.reset();
  session.reset();
  for (const at::Tensor& parameter : model->parameters()) {
    outcome.parameters.push_back(parameter.detach().clone());
  }
  return outcome;
}

class OffSchedule : public ::testing::TestWithParam<Way> {
 protected:
  ~OffSchedule() override { at::set_num_threads(threads_before_); }

  const int threads_before_ = at::get_num_threads();
  const TemporaryFolder folder_;
};

std::vector<Way> ways() {
  std::vector<Way> all;
  for (const Departure departure :
       {Departure::skipped_layer, Departure::other_length, Departure::evaluation, Departure::exception}) {
    for (const char* update : {"deferred", "immediate"}) {
      for (const bool uses_nvme : {false, true}) {
        all.push_back({departure, update, uses_nvme});
      }
    }
  }
  return all;
}

void print(const char* what, const std::vector<std::uint64_t>& fetches) {
  std::printf("%s:", what);
  for (const std::uint64_t count : fetches) {
    std::printf(" %llu", static_cast<unsigned long long>(count));
  }
  std::printf("\n");
}

/// Whether a transfer ahead of need can start in time depends on when others end, so that single steps differ between
/// runs, by a few of some 40 fetches.
constexpr std::uint64_t tolerance = 2;
/// Where others use the machine, threads may start late for the length of a run: of so many pairs of runs, one must
/// show what is promised.
constexpr int most_pairs = 4;

std::uint64_t median_from(const std::vector<std::uint64_t>& fetches, int first_step) {
  std::vector<std::uint64_t> sorted(fetches.begin() + first_step, fetches.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

using OwnFunctions = OffSchedule;

}  // namespace

INSTANTIATE_TEST_SUITE_P(Ways, OwnFunctions,
                         ::testing::Values(Way{Departure::none, "deferred", false},
                                           Way{Departure::none, "immediate", true}),
                         [](const auto& way) { return ::testing::PrintToString(way.param); });
INSTANTIATE_TEST_SUITE_P(Ways, OffSchedule, ::testing::ValuesIn(ways()),
                         [](const auto& way) { return ::testing::PrintToString(way.param); });

TEST_P(OffSchedule, keeps_the_bits_and_finds_back) {
  const Way way = GetParam();
  const Outcome unmanaged = train(way.departure, std::nullopt);
  bool finds_back = false;
  for (int pair = 0; pair < most_pairs && !finds_back; ++pair) {
    const Outcome undisturbed = train(Departure::none, config_for(way, folder_.path()));
    const Outcome managed = train(way.departure, config_for(way, folder_.path()));
    EXPECT_EQ(managed.losses, unmanaged.losses);
    ASSERT_EQ(managed.parameters.size(), unmanaged.parameters.size());
    for (std::size_t i = 0; i < managed.parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(managed.parameters[i], unmanaged.parameters[i])) << "parameter " << i;
    }
    print("fetches on demand, undisturbed", undisturbed.fetches);
    print("fetches on demand, disturbed  ", managed.fetches);
    const std::uint64_t usual = median_from(undisturbed.fetches, 2);
    const std::uint64_t most_on_schedule = usual + tolerance;
    const bool much_is_fetched_ahead = undisturbed.fetches[0] > 4 * usual;  // else it would prove little
    const bool leaves = std::max(managed.fetches[departs_at], managed.fetches[departs_at + 1]) > most_on_schedule;
    // Another length is taken to be like the usual one, and is.
    const bool as_expected = leaves == (way.departure != Departure::other_length);
    finds_back = much_is_fetched_ahead && as_expected && median_from(managed.fetches, back_at) <= most_on_schedule;
  }
  EXPECT_TRUE(finds_back);
}

TEST_P(OwnFunctions, are_fetched_for_ahead_of_need_as_ops_are) {
  const Way way = GetParam();
  const Outcome unmanaged = train(Departure::none, std::nullopt, Scaling::own_function);
  bool is_alike = false;
  for (int pair = 0; pair < most_pairs && !is_alike; ++pair) {
    const Outcome by_op = train(Departure::none, config_for(way, folder_.path()), Scaling::op);
    const Outcome managed = train(Departure::none, config_for(way, folder_.path()), Scaling::own_function);
    EXPECT_EQ(managed.losses, unmanaged.losses);
    print("fetches on demand, by ops      ", by_op.fetches);
    print("fetches on demand, by functions", managed.fetches);
    const std::uint64_t usual = median_from(by_op.fetches, 2);
    is_alike = by_op.fetches[0] > 4 * usual && median_from(managed.fetches, 2) <= usual + tolerance;
  }
  EXPECT_TRUE(is_alike);
}

}  // namespace terrace::testing
