#include "tools/stand_in_cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/units.h"
#include "integration/adamw.h"
#include "integration/session.h"
#include "offload/copy_rate.h"
#include "tools/bare_loops.h"
#include "tools/bare_nvme.h"
#include "tools/bench_session.h"
#include "tools/stand_in.h"

namespace terrace {
namespace {

constexpr Target kTarget{Target::Sense::at_most, 1.25};
constexpr double kMiB = 1024.0 * 1024.0;
// A seventh of the bf16 parameters, so that the link carries about as much in forward as in backward.
constexpr double kDeviceBytes = 20 * kMiB;
// States cannot be updated before step() nor after their parameters' first use, so that those on NVMe move in forward
// alone, but for what the host can keep from one step to the next: as much as lets NVMe be as busy as the whole step
// is long, and forward last as long as its share of the computation and of the link.
constexpr double kKept = 0.5;
constexpr double kHostMargin = 48 * kMiB;  // beside what rests and what is kept: staging, and states on their way
constexpr double kMostStepSeconds = 2;
constexpr double kOther = 0.65;     // of the bounding term, what the others are to take
constexpr double kBalanced = 0.93;  // of NVMe's, what the others take in the balanced case
constexpr double kLeastLink = 0.1e9;
constexpr double kMostLink = 2e9;
constexpr double kLinkOfCopy = 0.38;  // copies must not take the cores
constexpr int kTimedSteps = 4;
constexpr int kCalibrations = 4;
constexpr std::size_t kDriftCheck = 5;  // pairs

GptOptions model_options() { return {.layers = 12, .heads = 8, .width = 512, .sequence = 64}; }

Gpt make_model() {
  Gpt model(model_options());
  model->to(at::kBFloat16);
  return model;
}

/// Bytes of each parameter in bf16, of its gradient, and of its states in fp32: master, momentum, variance.
constexpr double kParameter = 2;
constexpr double kGradient = 2;
constexpr double kStates = 12;

/// What a case is made of.
struct Setting {
  double compute_seconds = 0;
  double link_rate = 0;
  double nvme_share = 0;  ///< of the states
};

/// Bytes of a step as the floors count them: parameters for forward and backward, less what the device can keep between
/// the two (the update makes the forward's new), gradients once, and the states on NVMe both ways. What the host keeps
/// of those from one step to the next is not taken off; the report gives what was moved beside this.
struct Necessary {
  Necessary(double parameters, double nvme_share)
      : in(kParameter * parameters + std::max(0.0, kParameter * parameters - kDeviceBytes)),
        out(kGradient * parameters),
        nvme_read(kStates * parameters * nvme_share),
        nvme_written(nvme_read) {}
  double in;
  double out;
  double nvme_read;
  double nvme_written;
};

/// The independent loops, shared by calibration and rounds.
struct Loops {
  Loops(const std::filesystem::path& folder, double parameters)
      : nvme(folder, static_cast<std::uint64_t>(kStates * parameters)) {}

  double nvme_seconds(const Necessary& necessary) {
    return nvme.seconds(static_cast<std::uint64_t>(necessary.nvme_read),
                        static_cast<std::uint64_t>(necessary.nvme_written));
  }

  Terms measure(StandIn& model, const Necessary& necessary, double link_rate) {
    const auto parameters = static_cast<double>(model.elements());
    const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
    Terms terms;
    terms[Term::compute] = model.bare_compute_seconds();
    terms[Term::host_to_device] = bare.link_seconds(whole(necessary.in), link_rate);
    terms[Term::device_to_host] = bare.link_seconds(whole(necessary.out), link_rate);
    terms[Term::nvme] = nvme_seconds(necessary);
    terms[Term::update] = bare.update_bf16_seconds(whole(parameters));
    const double copies = bare.copy_seconds(whole(necessary.in + necessary.out));
    const double checksums = bare.checksum_seconds(whole(necessary.nvme_read + necessary.nvme_written));
    const double gradients = bare.fill_seconds(whole(kGradient * parameters));
    terms[Term::cores] = (terms[Term::update] + copies + checksums + gradients) / hardware_cores();
    return terms;
  }

  BareLoops bare;
  BareNvme nvme;
};

/// Wanted sizes of compute, link and NVMe, of the step.
struct Weights {
  explicit Weights(Bound bound)
      : compute(of(Bound::compute, bound)), link(of(Bound::link, bound)), nvme(of(Bound::nvme, bound)) {
    if (bound == Bound::balanced) compute = link = kBalanced;
  }
  static double of(Bound part, Bound bound) { return bound == part || bound == Bound::balanced ? 1 : kOther; }
  double compute, link, nvme;
};

Setting calibrate(Bound bound, StandIn& model, Loops& loops) {
  const auto parameters = static_cast<double>(model.elements());
  const Weights weights(bound);
  const Necessary all_on_nvme(parameters, 1);
  std::vector<double> rates;
  std::vector<double> copy_rates;
  std::vector<double> core_seconds;
  for (int round = 0; round < 5; ++round) {
    rates.push_back(all_on_nvme.nvme_read / loops.nvme_seconds(all_on_nvme));
    copy_rates.push_back(measured_copy_rate());
    core_seconds.push_back(loops.measure(model, all_on_nvme, /*link_rate=*/1e12)[Term::cores]);
  }
  const double nvme_rate = median_of(rates);  // each way, both at once
  const double most_link = std::min(kMostLink, kLinkOfCopy * median_of(copy_rates));
  const double cores = median_of(core_seconds);

  double step = kMostStepSeconds;
  step = std::min(step, all_on_nvme.nvme_read / nvme_rate / weights.nvme);
  step = std::min(step, all_on_nvme.in / kLeastLink / weights.link);
  step = std::max({step, all_on_nvme.in / most_link / weights.link, cores / kOther});

  Setting setting;
  setting.compute_seconds = step * weights.compute;
  setting.link_rate = std::floor(std::min(all_on_nvme.in / (step * weights.link), most_link));
  setting.nvme_share = std::min(1.0, step * weights.nvme * nvme_rate / (kStates * parameters));
  return setting;
}

Config config_of(double parameters, const Setting& setting, const std::filesystem::path& nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.device.link = whole(setting.link_rate);
  config.host.memory = whole((kParameter + kGradient) * parameters +
                             kStates * parameters * (1 - setting.nvme_share * (1 - kKept)) + kHostMargin);
  config.nvme.paths = {nvme};
  config.nvme.memory = whole(kStates * parameters * 1.2 + 64 * kMiB);
  config.placement.parameters = Config::Shares{.host = 1};
  config.placement.gradients = Config::Shares{.host = 1};
  config.placement.optimizer = Config::Shares{.host = 1 - setting.nvme_share, .nvme = setting.nvme_share};
  config.placement.activations = "keep";
  config.log.level = LogLevel::warning;
  config.validate();
  return config;
}

std::string in_words(double parameters, const Setting& setting) {
  std::array<char, 200> text;
  std::snprintf(
      text.data(), text.size(),
      "%.1fM bf16 parameters, device %.0f MiB, link %.2f GB/s, %.0f%% of the states on NVMe, of which the host "
      "keeps %.0f%%, compute %.0f ms",
      parameters / 1e6, kDeviceBytes / kMiB, setting.link_rate / 1e9, 100 * setting.nvme_share, 100 * kKept,
      1e3 * setting.compute_seconds);
  return text.data();
}

/// Managed training of a stand-in.
class Steps {
 public:
  Steps(const std::vector<RecordedUse>& uses, double parameters, const Setting& setting,
        const std::filesystem::path& nvme)
      : session_(config_of(parameters, setting, nvme)) {
    with_typed_errors(session_, [&] {
      Gpt model = session_.construct([] { return make_model(); });
      session_.manage(*model);
      // A learning rate of 0 leaves parameters, and so the loss, as they are; the update costs the same.
      optimizer_.emplace(session_, torch::optim::AdamWOptions(0.0));
      stand_in_.emplace(model, uses);
      stand_in_->set_compute_seconds(setting.compute_seconds);
      step();
      step();
      session_.synchronize();
      round();
      traffic_ = {};
    });
  }

  double round() {
    return with_typed_errors(session_, [&] {
      step();
      const MemoryUsage before = session_.memory_usage();
      const Stopwatch watch;
      for (int i = 0; i < kTimedSteps; ++i) step();
      const double seconds = watch.elapsed_seconds() / kTimedSteps;
      traffic_.add(before, session_.memory_usage(), kTimedSteps);
      session_.synchronize();
      return seconds;
    });
  }

  const StepTraffic& traffic() const { return traffic_; }
  StandIn& stand_in() { return *stand_in_; }

  /// Medians, also of the steps that are not timed.
  std::string phases_in_words() const {
    std::array<char, 100> text;
    std::snprintf(text.data(), text.size(), "; forward takes %.0f ms, backward %.0f ms, step() %.0f ms",
                  median_of(forward_ms_), median_of(backward_ms_), median_of(update_ms_));
    return text.data();
  }

 private:
  void step() {
    const std::int64_t start_ns = monotonic_ns();
    const at::Tensor loss = stand_in_->forward();
    const auto value = loss.item<float>();
    if (loss_ && *loss_ != value) {
      throw LogicError("bench: the sum over the parameters changed from " + std::to_string(*loss_) + " to " +
                       std::to_string(value) + ", and nothing has changed them");
    }
    loss_ = value;
    const std::int64_t forward_ns = monotonic_ns();
    loss.backward();
    const std::int64_t backward_ns = monotonic_ns();
    optimizer_->step();
    optimizer_->zero_grad();
    forward_ms_.push_back(static_cast<double>(forward_ns - start_ns) * 1e-6);
    backward_ms_.push_back(static_cast<double>(backward_ns - forward_ns) * 1e-6);
    update_ms_.push_back(static_cast<double>(monotonic_ns() - backward_ns) * 1e-6);
  }

  Session session_;
  std::optional<AdamW> optimizer_;
  std::optional<StandIn> stand_in_;
  std::optional<float> loss_;
  StepTraffic traffic_;
  std::vector<double> forward_ms_, backward_ms_, update_ms_;  // by step
};

/// Nothing where the rates have drifted so that the case is not what its name says, and `may_give_up`.
std::optional<BenchCase> measure(Bound bound, const std::vector<RecordedUse>& uses, const Setting& setting,
                                 const std::filesystem::path& nvme, Loops& loops, PairOptions options,
                                 double parameters, bool may_give_up) {
  Steps steps(uses, parameters, setting, nvme);
  const Necessary necessary(parameters, setting.nvme_share);
  std::vector<double> seconds;
  std::vector<double> floors;
  std::vector<Terms> rounds;
  bool drifted = false;
  const auto stopped = std::exchange(options.stop, {});
  options.stop = [&] {
    if (may_give_up && !rounds.empty() && rounds.size() % kDriftCheck == 0) {
      drifted = !is_as_defined(bound, Terms::median_of(rounds));
    }
    return drifted || stopped();
  };
  options.target = kTarget;
  const Comparison comparison = compare_in_pairs(
      options,
      [&] {
        seconds.push_back(steps.round());
        return seconds.back();
      },
      [&] {
        rounds.push_back(loops.measure(steps.stand_in(), necessary, setting.link_rate));
        floors.push_back(rounds.back().floor_seconds());
        return floors.back();
      });
  BenchCase result;
  if (comparison.ratios.empty()) return result;
  if (drifted) return std::nullopt;
  result.terms = Terms::median_of(rounds);
  result.as_defined = is_as_defined(bound, result.terms);
  if (!*result.as_defined && may_give_up && !stopped()) return std::nullopt;
  result.setting = in_words(parameters, setting) + steps.phases_in_words();
  result.seconds = median_of(seconds);
  result.floor_seconds = median_of(floors);
  result.ratio = comparison.ratio;
  result.bound_by = term_names[static_cast<std::size_t>(result.terms.largest())];
  steps.traffic().report(result);
  result.necessary_bytes = {necessary.nvme_read, necessary.nvme_written, necessary.in, necessary.out};
  result.pairs = comparison.ratios.size();
  result.target = kTarget;
  result.verdict = comparison.verdict;
  return result;
}

}  // namespace

BenchCase run_stand_in_case(Bound bound, const std::filesystem::path& nvme, PairOptions options) {
  const ThreadsOfLibTorch one_thread(1);
  const std::vector<RecordedUse> uses = record_uses(model_options());
  StandIn unmanaged(make_model(), uses);
  const auto parameters = static_cast<double>(unmanaged.elements());
  Loops loops(nvme, parameters);
  for (int attempt = 1;; ++attempt) {
    const Setting setting = calibrate(bound, unmanaged, loops);
    const auto measured =
        measure(bound, uses, setting, nvme, loops, options, parameters, /*may_give_up=*/attempt < kCalibrations);
    if (measured) return *measured;
    std::fprintf(stderr, "  the rates have drifted: calibrating again\n");
  }
}

}  // namespace terrace
