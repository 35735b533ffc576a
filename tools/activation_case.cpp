#include "tools/activation_case.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "integration/adamw.h"
#include "integration/interceptor.h"
#include "integration/pause.h"
#include "integration/session.h"
#include "tools/bench_session.h"
#include "tools/gpt.h"
#include "tools/paired.h"
#include "tools/timed_blocks.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;
/// Of the device, beside what is saved: parameters, gradients and the program's small tensors.
constexpr std::uint64_t kBesideBlocks = 2 * kMiB;
/// By then residency knows the step, and where there is a plan, it is judged.
constexpr int kWarmSteps = 3;
constexpr int kWarmStepsOfAuto = 10;
constexpr int kTimedSteps = 5;
/// Of a GPT, beside each other: a pass differs from the next by more than activations that move take.
constexpr int kTimedPasses = 4;

/// Of a GPT.
struct GptSetting {
  GptOptions options;
  std::int64_t sequences;
  std::uint64_t states_bytes;      ///< parameters and gradients, with the program's tensors beside them
  std::uint64_t activation_bytes;  ///< about what is saved
};
constexpr std::uint64_t kGptHost = 1024 * kMiB;

GptSetting wide_gpt() {
  return {.options = {.layers = 6, .heads = 8, .width = 384, .sequence = 256},
          .sequences = 8,
          .states_bytes = 112 * kMiB,
          .activation_bytes = 300 * kMiB};
}

GptSetting narrow_gpt() {
  return {.options = {.layers = 6, .heads = 4, .width = 128, .sequence = 256},
          .sequences = 16,
          .states_bytes = 48 * kMiB,
          .activation_bytes = 200 * kMiB};
}

Config config_of(const std::string& activations, std::uint64_t device_bytes, std::uint64_t host_bytes,
                 const std::filesystem::path& folder) {
  Config config;
  config.device.kind = "emulated";
  config.device.memory = device_bytes;
  config.host.memory = host_bytes;
  if (activations == "nvme") {
    config.nvme.paths = {folder};
    config.nvme.memory = host_bytes;
  }
  config.placement.chunk = kMiB;
  config.placement.activations = activations;
  config.log.level = LogLevel::warning;
  return config;
}

/// Parameters and gradients are on the device, and there is room for the rest, or for half of what is saved.
Config gpt_config(const GptSetting& setting, bool room_for_all) {
  Config config = room_for_all ? config_of("auto", setting.states_bytes + 4 * setting.activation_bytes, kGptHost, {})
                               : config_of("host", setting.states_bytes + setting.activation_bytes / 2, kGptHost, {});
  config.placement.parameters = Config::Shares{.device = 1};
  config.placement.gradients = Config::Shares{.device = 1};
  return config;
}

/// Steps of a session, some of which are timed.
ActivationRun timed(Session& session, const std::string& activations, const std::function<void()>& step) {
  return with_typed_errors(session, [&] {
    const int warm = activations == "auto" ? kWarmStepsOfAuto : kWarmSteps;
    for (int i = 0; i < warm; ++i) step();
    session.synchronize();
    const MemoryUsage before = session.memory_usage();
    std::vector<double> seconds;
    for (int i = 0; i < kTimedSteps; ++i) {
      const Stopwatch watch;
      step();
      seconds.push_back(watch.elapsed_seconds());
    }
    const MemoryUsage after = session.memory_usage();
    const auto moved = [&](Link link) {
      return static_cast<double>(after.moved(link, Kind::activation) - before.moved(link, Kind::activation)) /
             kTimedSteps;
    };
    return ActivationRun{.activations = activations,
                         .seconds = median_of(seconds),
                         .left_device_bytes = moved(Link::device_to_host),
                         .reached_device_bytes = moved(Link::host_to_device),
                         .report = session.activation_report()};
  });
}

}  // namespace

std::uint64_t saved_bytes(const ActivationSetting& setting) {
  std::uint64_t saved = 0;
  for (const BlockProfile& block : setting.blocks) saved += block.saved_bytes;
  return saved;
}

ActivationRun run_timed_blocks(const ActivationSetting& setting, const std::string& activations, bool room_for_all,
                               const std::filesystem::path& folder) {
  const ThreadsOfLibTorch one(1);
  const std::uint64_t saved = saved_bytes(setting);
  Config config = config_of(activations, (room_for_all ? 2 * saved : setting.room_bytes) + kBesideBlocks,
                            2 * saved + 64 * kMiB, folder);
  config.device.link = static_cast<std::uint64_t>(setting.link_rate);
  Session session(config);
  TimedBlocks model(setting.blocks);
  session.manage(model);
  AdamW optimizer(session, torch::optim::AdamWOptions(0.0));
  return timed(session, activations, [&] {
    model.forward().backward();
    optimizer.step();
    optimizer.zero_grad();
  });
}

struct GptBesideUnmanaged::Sides {
  explicit Sides(Activations activations)
      : setting(activations == Activations::stay ? wide_gpt() : narrow_gpt()),
        session(gpt_config(setting, activations == Activations::stay)) {
    torch::manual_seed(1);
    managed = Gpt(setting.options);
    session.manage(*managed);
    {
      const Pause pause;
      torch::manual_seed(1);
      unmanaged = Gpt(setting.options);
      tokens = at::randint(0, GptOptions::vocabulary, {setting.sequences, setting.options.sequence + 1}, at::kLong);
    }
    with_typed_errors(session, [&] {
      for (int i = 0; i < kWarmSteps; ++i) {
        if (pass(managed) != paused_pass(unmanaged)) {
          throw LogicError("bench: the loss depends on whether a GPT is managed");
        }
        require_same_gradients();
        managed->zero_grad();
        unmanaged->zero_grad();
      }
    });
  }

  /// What activations that moved come to.
  void require_same_gradients() const {
    const std::vector<at::Tensor> ours = managed->parameters();
    const std::vector<at::Tensor> expected = unmanaged->parameters();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (!at::equal(ours[i].grad(), expected[i].grad())) {
        throw LogicError("bench: gradients depend on whether a GPT is managed");
      }
    }
  }

  float pass(Gpt& model) const {
    const std::int64_t sequence = setting.options.sequence;
    const at::Tensor loss = model->forward(tokens.narrow(1, 0, sequence), tokens.narrow(1, 1, sequence).contiguous());
    loss.backward();
    return loss.item<float>();
  }
  float paused_pass(Gpt& model) const {
    const Pause pause;
    return pass(model);
  }
  /// Seconds of a pass.
  double time(Gpt& model) const {
    const Stopwatch watch;
    for (int i = 0; i < kTimedPasses; ++i) {
      pass(model);
      model->zero_grad();
    }
    return watch.elapsed_seconds() / kTimedPasses;
  }

  const GptSetting setting;
  Session session;
  Gpt managed = nullptr;
  Gpt unmanaged = nullptr;
  at::Tensor tokens;
  double left_device_bytes = 0;
  double reached_device_bytes = 0;
};

GptBesideUnmanaged::GptBesideUnmanaged(Activations activations) : sides_(std::make_unique<Sides>(activations)) {}
GptBesideUnmanaged::~GptBesideUnmanaged() = default;

double GptBesideUnmanaged::managed_seconds() {
  return with_typed_errors(sides_->session, [&] {
    const MemoryUsage before = sides_->session.memory_usage();
    const double seconds = sides_->time(sides_->managed);
    const MemoryUsage after = sides_->session.memory_usage();
    const auto moved = [&](Link link) {
      return static_cast<double>(after.moved(link, Kind::activation) - before.moved(link, Kind::activation)) /
             kTimedPasses;
    };
    sides_->left_device_bytes = moved(Link::device_to_host);
    sides_->reached_device_bytes = moved(Link::host_to_device);
    return seconds;
  });
}

double GptBesideUnmanaged::unmanaged_seconds() {
  const Pause pause;
  return sides_->time(sides_->unmanaged);
}

double GptBesideUnmanaged::left_device_bytes() const { return sides_->left_device_bytes; }
double GptBesideUnmanaged::reached_device_bytes() const { return sides_->reached_device_bytes; }

namespace {

/// While one lives, each op comes by a callback that is given its inputs and does nothing, and not by ours.
class EmptyCallback {
 public:
  EmptyCallback()
      : callback_(at::addGlobalCallback(
            at::RecordFunctionCallback(&nothing).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}
  ~EmptyCallback() { at::removeCallback(callback_); }
  EmptyCallback(const EmptyCallback&) = delete;
  EmptyCallback& operator=(const EmptyCallback&) = delete;

 private:
  static std::unique_ptr<at::ObserverContext> nothing(const at::RecordFunction&) { return nullptr; }

  const InterceptionOff no_other_;
  const at::CallbackHandle callback_;
};

}  // namespace

InterceptionCost measure_interception() {
  constexpr int ops = 20'000;
  constexpr int rounds = 15;
  const ThreadsOfLibTorch one(1);
  Session session(gpt_config(wide_gpt(), true));
  torch::nn::Linear module(1, 1);
  session.manage(*module);
  const at::NoGradGuard no_graph;
  at::Tensor sum = at::zeros({1});
  at::Tensor ordinary;
  at::Tensor bare;
  {
    const Pause pause;
    ordinary = at::ones({1}).requires_grad_();  // what LibTorch does more for a parameter is not our cost
    bare = at::zeros({1});
  }
  const auto seconds_of = [&](at::Tensor& to, const at::Tensor& operand) {
    const Stopwatch watch;
    for (int i = 0; i < ops; ++i) to.add_(operand);
    return watch.elapsed_seconds() / ops;
  };
  std::vector<double> any;
  std::vector<double> managed;
  for (int round = 0; round < rounds; ++round) {
    double empty = 0;
    {
      const EmptyCallback callback;
      empty = seconds_of(bare, ordinary);
    }
    any.push_back(seconds_of(sum, ordinary) - empty);
    managed.push_back(seconds_of(sum, module->bias) - empty);
  }
  return {.of_any_op = median_of(std::move(any)), .of_managed_op = median_of(std::move(managed))};
}

PassProfile profile_of(const ActivationSetting& setting) {
  return {.blocks = setting.blocks,
          .room_bytes = setting.room_bytes,
          .out_bytes_per_second = setting.link_rate,
          .in_bytes_per_second = setting.link_rate};
}

BestPlan search_exhaustively(const ActivationSetting& setting) {
  const PassProfile pass = profile_of(setting);
  const std::size_t count = pass.blocks.size();
  BestPlan best;
  for (std::uint64_t choice = 0; choice < std::uint64_t{1} << count; ++choice) {
    Recomputed recomputed(count);
    for (std::size_t i = 0; i < count; ++i) recomputed[i] = ((choice >> i) & 1U) != 0;
    const double seconds = play(pass, recomputed).seconds;
    if (choice == 0 || seconds < best.seconds) best = {std::move(recomputed), seconds};
  }
  return best;
}

}  // namespace terrace
