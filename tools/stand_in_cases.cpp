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
constexpr double kDeviceBytes = 32 * kMiB;
constexpr double kHostMargin = 40 * kMiB;  // beside what rests: staging, and states on their way
constexpr double kStepSeconds = 0.25;      // where the rates leave the choice
constexpr double kOther = 0.65;            // of the bounding term, what the others are to take
constexpr double kLeastLink = 0.25e9;
constexpr double kMostLink = 2e9;
constexpr double kLinkOfCopy = 0.38;  // copies must not take the cores
constexpr int kTimedSteps = 4;
constexpr int kCalibrations = 4;
constexpr std::size_t kDriftCheck = 5;  // pairs

GptOptions model_options() { return {.layers = 8, .heads = 6, .width = 384, .sequence = 64}; }

/// What a case is made of.
struct Setting {
  double compute_seconds = 0;
  double link_rate = 0;
  double nvme_share = 0;  ///< of the states
};

/// Bytes that a step cannot do without: parameters for forward and backward, less what the device can keep between the
/// two (the update makes the forward's new), gradients once, and the states on NVMe both ways.
struct Necessary {
  Necessary(double parameters, double nvme_share)
      : in(4 * parameters + std::max(0.0, 4 * parameters - kDeviceBytes)),
        out(4 * parameters),
        nvme_read(8 * parameters * nvme_share),
        nvme_written(nvme_read) {}
  double in;
  double out;
  double nvme_read;
  double nvme_written;
};

/// The independent loops, shared by calibration and rounds.
struct Loops {
  Loops(const std::filesystem::path& folder, double parameters)
      : nvme(folder, static_cast<std::uint64_t>(8 * parameters)) {}

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
    terms[Term::update] = bare.update_seconds(whole(parameters));
    const double copies = bare.copy_seconds(whole(necessary.in + necessary.out));
    const double checksums = bare.checksum_seconds(whole(necessary.nvme_read + necessary.nvme_written));
    const double gradients = bare.fill_seconds(whole(4 * parameters));
    terms[Term::cores] = (terms[Term::update] + copies + checksums + gradients) / hardware_cores();
    return terms;
  }

  BareLoops bare;
  BareNvme nvme;
};

/// Wanted sizes of compute, link and NVMe, of the step.
struct Weights {
  explicit Weights(Bound bound)
      : compute(of(Bound::compute, bound)), link(of(Bound::link, bound)), nvme(of(Bound::nvme, bound)) {}
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

  double step = kStepSeconds;
  step = std::min(step, all_on_nvme.nvme_read / nvme_rate / weights.nvme);
  step = std::min(step, all_on_nvme.in / kLeastLink / weights.link);
  step = std::max({step, all_on_nvme.in / most_link / weights.link, cores / kOther});

  Setting setting;
  setting.compute_seconds = step * weights.compute;
  setting.link_rate = std::floor(std::min(all_on_nvme.in / (step * weights.link), most_link));
  setting.nvme_share = std::min(1.0, step * weights.nvme * nvme_rate / (8 * parameters));
  return setting;
}

Config config_of(double parameters, const Setting& setting, const std::filesystem::path& nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.device.link = whole(setting.link_rate);
  config.host.memory = whole(8 * parameters + 8 * parameters * (1 - setting.nvme_share) + kHostMargin);
  config.nvme.paths = {nvme};
  config.nvme.memory = whole(8 * parameters * 1.2 + 64 * kMiB);
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
  std::snprintf(text.data(), text.size(),
                "%.1fM parameters, device %.0f MiB, link %.2f GB/s, %.0f%% of the states on NVMe, compute %.0f ms",
                parameters / 1e6, kDeviceBytes / kMiB, setting.link_rate / 1e9, 100 * setting.nvme_share,
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
      Gpt model = session_.construct([] { return Gpt(model_options()); });
      session_.manage(*model);
      // A learning rate of 0 leaves parameters, and so the loss, as they are; the update costs the same.
      optimizer_.emplace(session_, torch::optim::AdamWOptions(0.0));
      stand_in_.emplace(model, uses);
      stand_in_->set_compute_seconds(setting.compute_seconds);
      step();
      step();
      session_.synchronize();
      round();
      usual_ = std::exchange(traffic_, {});
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
  /// What a step moves, as known before the first that counts.
  double usual(Link link) const { return usual_.moved(link); }
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
  StepTraffic usual_;
  std::vector<double> forward_ms_, backward_ms_, update_ms_;  // by step
};

/// Nothing where the rates have drifted so that the case is not what its name says, and `may_give_up`.
std::optional<BenchCase> measure(Bound bound, const std::vector<RecordedUse>& uses, const Setting& setting,
                                 const std::filesystem::path& nvme, Loops& loops, PairOptions options,
                                 double parameters, bool may_give_up) {
  Steps steps(uses, parameters, setting, nvme);
  Necessary necessary(parameters, setting.nvme_share);
  // States that the host could keep from step to step need not move: no floor is above what was enough.
  necessary.nvme_read = std::min(necessary.nvme_read, steps.usual(Link::nvme_to_host));
  necessary.nvme_written = std::min(necessary.nvme_written, steps.usual(Link::host_to_nvme));
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
  StandIn unmanaged(Gpt(model_options()), uses);
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
