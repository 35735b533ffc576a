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
#include "offload/choose_engine.h"
#include "offload/copy_rate.h"
#include "offload/emulated_computation.h"
#include "tools/bare_loops.h"
#include "tools/bare_nvme.h"
#include "tools/bench_session.h"
#include "tools/paced_engine.h"
#include "tools/stand_in.h"
#include "tools/step_phases.h"
#include "tools/stolen_time.h"

namespace terrace {
namespace {

constexpr Target kTarget{Target::Sense::at_most, 1.15};
constexpr Target kBytesTarget{Target::Sense::at_most, 1.05};
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kDeviceBytes = 40 * kMiB;
// What the host has room for beside what rests there: gradients on their way, to and from NVMe.
constexpr double kHostRoom = 32 * kMiB;
constexpr double kHostRounding = 4 * kMiB;  // at most, as what rests there takes whole granules; a chunk is no less
constexpr double kOther = 0.65;             // of the bounding term, what the others are to take
constexpr double kBalanced = 0.92;          // of the computation, what the others are to take in the balanced case
constexpr double kCores = 0.4;              // of the bounding term, what the cores may have to do
// Link and drive are no faster than what this machine does while it does other things, and while its speed drifts.
constexpr double kMostLink = 2e9;
constexpr double kLinkOfCopy = 0.38;
constexpr double kDriveOfBare = 0.7;
constexpr int kMostTimedSteps = 4;
constexpr double kTimedSeconds = 3;
constexpr int kCalibrations = 4;
constexpr std::size_t kDriftCheck = 5;  // pairs

GptOptions model_options() { return {.layers = 24, .heads = 8, .width = 512, .sequence = 64}; }

constexpr double kElementBytes = 4;  // fp32, and as much again for the gradient and for either moment

/// What a case is made of; rates in bytes a second.
struct Setting {
  double compute_seconds = 0;
  double link_rate = 0;
  double drive_rate = 0;  ///< of reads and writes together
};

/// What a case needs for a model of so many parameters.
struct Needs {
  Needs(const StandInCase& of, double elements)
      : which(of),
        parameters(kElementBytes * elements),
        phases(phases_of_step({.parameters = parameters,
                               .device_room = kDeviceBytes,
                               .host_room = kHostRoom,
                               .nvme_share = of.nvme_share,
                               .micro_batches = of.micro_batches})),
        bytes(bytes_of(phases)) {}

  double moved(Link link) const { return bytes[index_of(link)]; }
  double on_nvme() const { return moved(Link::nvme_to_host) + moved(Link::host_to_nvme); }
  double gradients() const { return parameters * which.micro_batches; }  // made by backward

  const StandInCase which;
  const double parameters;
  const std::vector<StepPhase> phases;
  const LinkBytes bytes;
};

/// The independent loops, shared by calibration and rounds.
struct Loops {
  Loops(const std::filesystem::path& folder, const Needs& of)
      : needs(of), nvme(folder, whole(std::max(of.moved(Link::nvme_to_host), of.moved(Link::host_to_nvme)))) {}

  /// Of a drive of that rate, or of the real one if that is slower.
  double nvme_seconds(double drive_rate) {
    const std::int64_t started_ns = monotonic_ns();
    nvme.seconds(whole(needs.moved(Link::nvme_to_host)), whole(needs.moved(Link::host_to_nvme)));
    sleep_until(started_ns + static_cast<std::int64_t>(needs.on_nvme() / drive_rate * 1e9));
    return static_cast<double>(monotonic_ns() - started_ns) * 1e-9;
  }

  /// Of what the drive is slowest at: a forward reads most of the time, and a backward writes.
  double least_drive_rate() {
    const double read = needs.moved(Link::nvme_to_host);
    const double written = needs.moved(Link::host_to_nvme);
    return std::min({read / nvme.seconds(whole(read), 0), written / nvme.seconds(0, whole(written)),
                     (read + written) / nvme.seconds(whole(read), whole(written))});
  }

  double core_seconds(double update_seconds) {
    const double copies =
        bare.copy_seconds(whole(needs.moved(Link::host_to_device) + needs.moved(Link::device_to_host)));
    const double checksums = bare.checksum_seconds(whole(needs.on_nvme()));
    const double gradients = bare.fill_seconds(whole(needs.gradients()));
    return (update_seconds + copies + checksums + gradients) / hardware_cores();
  }

  Terms measure(StandIn& model, const Setting& setting) {
    Terms terms;
    for (int batch = 0; batch < needs.which.micro_batches; ++batch)
      terms[Term::compute] += model.bare_compute_seconds();
    terms[Term::host_to_device] = bare.link_seconds(whole(needs.moved(Link::host_to_device)), setting.link_rate);
    terms[Term::device_to_host] = bare.link_seconds(whole(needs.moved(Link::device_to_host)), setting.link_rate);
    terms[Term::nvme] = nvme_seconds(setting.drive_rate);
    terms[Term::update] = bare.update_seconds(static_cast<std::uint64_t>(model.elements()));
    terms[Term::cores] = core_seconds(terms[Term::update]);
    return terms;
  }

  static std::uint64_t whole(double bytes) { return static_cast<std::uint64_t>(bytes); }

  const Needs& needs;
  BareLoops bare;
  BareNvme nvme;
};

/// Wanted sizes of a term, relative to the largest. Of the balanced ones computation is that: two thirds of it are
/// backward, and about half of the others, so that otherwise it could not be hidden behind them.
double weight_of(Bound term, Bound bound) {
  if (bound == Bound::balanced) return term == Bound::compute ? 1 : kBalanced;
  return term == bound ? 1 : kOther;
}

/// The shortest step for which link, drive and cores are fast enough.
Setting calibrate(Bound bound, StandIn& model, Loops& loops) {
  const double link = weight_of(Bound::link, bound);
  const double nvme = weight_of(Bound::nvme, bound);
  std::vector<double> drive_rates;
  std::vector<double> copy_rates;
  std::vector<double> core_times;
  for (int round = 0; round < 5; ++round) {
    drive_rates.push_back(loops.least_drive_rate());
    copy_rates.push_back(measured_copy_rate());
    core_times.push_back(loops.core_seconds(loops.bare.update_seconds(static_cast<std::uint64_t>(model.elements()))));
  }
  const Needs& needs = loops.needs;
  const double on_link = std::max(needs.moved(Link::host_to_device), needs.moved(Link::device_to_host));
  const double most_link = std::min(kMostLink, kLinkOfCopy * median_of(copy_rates));
  const double most_drive = kDriveOfBare * median_of(drive_rates);
  const double step =
      std::max({on_link / most_link / link, needs.on_nvme() / most_drive / nvme, median_of(core_times) / kCores});
  return {.compute_seconds = step * weight_of(Bound::compute, bound),
          .link_rate = std::floor(on_link / (step * link)),
          .drive_rate = std::floor(needs.on_nvme() / (step * nvme))};
}

Config config_of(const Needs& needs, const Setting& setting, const std::filesystem::path& nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  const double on_nvme = needs.which.nvme_share;
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.device.link = whole(setting.link_rate);
  const double resting = (3 - on_nvme) * needs.parameters;  // both moments rest there
  config.host.memory = whole(resting + kHostRounding + kHostRoom);
  config.nvme.paths = {nvme};
  config.nvme.memory = whole((1 + on_nvme) * needs.parameters * 1.2 + 64 * kMiB);
  config.placement.parameters = Config::Shares{.host = 1 - on_nvme, .nvme = on_nvme};
  config.placement.gradients = Config::Shares{.nvme = 1};
  config.placement.optimizer = Config::Shares{.host = 1};
  config.placement.activations = "keep";
  config.log.level = LogLevel::warning;
  config.validate();
  const MemoryPlan plan = plan_of(config);
  config.host.memory = plan.host_memory_for(*config.host.memory + plan.staging_bytes() + plan.timeline_bytes);
  return config;
}

std::string in_words(const Needs& needs, const Setting& setting) {
  std::array<char, 240> text;
  std::snprintf(
      text.data(), text.size(),
      "%.1fM fp32 parameters, %.0f%% of them on NVMe, gradients there%s, %d micro-batches, device %.0f MiB, host room "
      "%.0f MiB, link %.2f GB/s, drive %.2f GB/s, compute %.0f ms",
      needs.parameters / kElementBytes / 1e6, 100 * needs.which.nvme_share, needs.which.clips ? " and clipped" : "",
      needs.which.micro_batches, kDeviceBytes / kMiB, kHostRoom / kMiB, setting.link_rate / 1e9,
      setting.drive_rate / 1e9, 1e3 * setting.compute_seconds);
  return text.data();
}

/// While it lives, sessions use drives of that speed.
class PacedDrives {
 public:
  explicit PacedDrives(double bytes_per_second) {
    decorate_io_engines([rate = static_cast<std::uint64_t>(bytes_per_second)](std::unique_ptr<IoEngine> engine) {
      return std::make_unique<PacedEngine>(std::move(engine), rate);
    });
  }
  ~PacedDrives() { decorate_io_engines(nullptr); }
  PacedDrives(const PacedDrives&) = delete;
  PacedDrives& operator=(const PacedDrives&) = delete;
};

/// Managed training of a stand-in.
class Steps {
 public:
  Steps(const std::vector<RecordedUse>& uses, const Needs& needs, const Setting& setting,
        const std::filesystem::path& nvme)
      : drives_(setting.drive_rate),
        session_(config_of(needs, setting, nvme)),
        micro_batches_(needs.which.micro_batches),
        timed_steps_(std::clamp(static_cast<int>(kTimedSeconds / setting.compute_seconds), 1, kMostTimedSteps)) {
    with_typed_errors(session_, [&] {
      Gpt model = session_.construct([] { return Gpt(model_options()); });
      session_.manage(*model);
      // A learning rate of 0 leaves parameters, and so the loss, as they are; the update costs the same.
      optimizer_.emplace(session_, torch::optim::AdamWOptions(0.0));
      if (needs.which.clips) optimizer_->max_gradient_norm(1.0);
      stand_in_.emplace(model, uses);
      stand_in_->set_compute_seconds(setting.compute_seconds / micro_batches_);
      step();
      step();
      session_.synchronize();
      round();
      traffic_ = {};
      stolen_ = {};
    });
  }

  double round() {
    return with_typed_errors(session_, [&] {
      step();
      const MemoryUsage before = session_.memory_usage();
      const double seconds = stolen_.during([&] {
        const Stopwatch watch;
        for (int i = 0; i < timed_steps_; ++i) step();
        return watch.elapsed_seconds() / timed_steps_;
      });
      traffic_.add(before, session_.memory_usage(), timed_steps_);
      session_.synchronize();
      return seconds;
    });
  }

  const StepTraffic& traffic() const { return traffic_; }
  const StolenTime& stolen() const { return stolen_; }
  StandIn& stand_in() { return *stand_in_; }

  /// Medians, also of the steps that are not timed.
  std::string phases_in_words() const {
    std::array<char, 120> text;
    std::snprintf(text.data(), text.size(),
                  "; the program is %.0f ms in forward, %.0f in backward, %.0f in step(), and "
                  "waits %.0f for the device",
                  median_of(forward_ms_), median_of(backward_ms_), median_of(update_ms_), median_of(waited_ms_));
    return text.data();
  }

 private:
  void step() {
    at::Tensor loss;
    double forward_ms = 0;
    double backward_ms = 0;
    std::int64_t last_ns = monotonic_ns();
    const auto milliseconds = [&] {
      const std::int64_t before_ns = std::exchange(last_ns, monotonic_ns());
      return static_cast<double>(last_ns - before_ns) * 1e-6;
    };
    for (int batch = 0; batch < micro_batches_; ++batch) {
      loss = stand_in_->forward();
      forward_ms += milliseconds();
      loss.backward();
      backward_ms += milliseconds();
    }
    optimizer_->step();
    optimizer_->zero_grad();
    update_ms_.push_back(milliseconds());
    EmulatedComputation::of_this_process().wait();  // as whoever reads the loss does
    const auto value = loss.item<float>();
    if (loss_ && *loss_ != value) {
      throw LogicError("bench: the sum over the parameters changed from " + std::to_string(*loss_) + " to " +
                       std::to_string(value) + ", and nothing has changed them");
    }
    loss_ = value;
    forward_ms_.push_back(forward_ms);
    backward_ms_.push_back(backward_ms);
    waited_ms_.push_back(milliseconds());
  }

  const PacedDrives drives_;
  Session session_;
  std::optional<AdamW> optimizer_;
  std::optional<StandIn> stand_in_;
  const int micro_batches_;
  const int timed_steps_;
  std::optional<float> loss_;
  StepTraffic traffic_;
  StolenTime stolen_;
  std::vector<double> forward_ms_, backward_ms_, update_ms_, waited_ms_;  // by step
};

/// Nothing where the rates have drifted so that the case is not what its name says, and `may_give_up`.
std::optional<BenchCase> measure(const std::vector<RecordedUse>& uses, const Setting& setting,
                                 const std::filesystem::path& nvme, Loops& loops, PairOptions options,
                                 bool may_give_up) {
  const Needs& needs = loops.needs;
  const Bound bound = needs.which.bound;
  Steps steps(uses, needs, setting, nvme);
  std::vector<double> seconds;
  std::vector<double> floors;
  std::vector<double> phased_floors;
  std::vector<double> phased_ratios;
  std::vector<Terms> rounds;
  StolenTime stolen_beside;
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
        rounds.push_back(stolen_beside.during([&] { return loops.measure(steps.stand_in(), setting); }));
        floors.push_back(rounds.back().floor_seconds());
        phased_floors.push_back(phased_floor_seconds(needs.phases, rounds.back()));
        return floors.back();
      });
  BenchCase result;
  if (comparison.ratios.empty()) return result;
  if (drifted) return std::nullopt;
  result.terms = Terms::median_of(rounds);
  result.as_defined = is_as_defined(bound, result.terms);
  if (!*result.as_defined && may_give_up && !stopped()) return std::nullopt;
  result.setting = in_words(needs, setting) + steps.phases_in_words();
  result.seconds = median_of(seconds);
  result.floor_seconds = median_of(floors);
  result.ratio = comparison.ratio;
  for (std::size_t pair = 0; pair < comparison.ratios.size(); ++pair) {
    phased_ratios.push_back(seconds[pair] / phased_floors[pair]);
  }
  result.phased_floor_seconds = median_of(phased_floors);
  result.phased_ratio = median_interval(phased_ratios);
  result.bound_by = term_names[static_cast<std::size_t>(result.terms.largest())];
  steps.traffic().report(result);
  result.stolen_share = steps.stolen().share();
  result.stolen_beside = stolen_beside.share();
  result.necessary_bytes = needs.bytes;
  result.pairs = comparison.ratios.size();
  result.target = kTarget;
  result.verdict = comparison.verdict;
  const double bytes = result.bytes_ratio().value();
  result.judge_also("bytes", {bytes, bytes, bytes}, kBytesTarget);
  return result;
}

}  // namespace

BenchCase run_stand_in_case(const StandInCase& which, const std::filesystem::path& nvme, PairOptions options) {
  const ThreadsOfLibTorch one_thread(1);
  const std::vector<RecordedUse> uses = record_uses(model_options());
  StandIn unmanaged(Gpt(model_options()), uses);
  const Needs needs(which, static_cast<double>(unmanaged.elements()));
  Loops loops(nvme, needs);
  for (int attempt = 1;; ++attempt) {
    const Setting setting = calibrate(which.bound, unmanaged, loops);
    const auto measured = measure(uses, setting, nvme, loops, options, /*may_give_up=*/attempt < kCalibrations);
    if (measured) return *measured;
    std::fprintf(stderr, "  the rates have drifted: calibrating again\n");
  }
}

}  // namespace terrace
