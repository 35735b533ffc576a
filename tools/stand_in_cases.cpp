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

namespace terrace {
namespace {

constexpr Target kTarget{Target::Sense::at_most, 1.25};
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kDeviceBytes = 40 * kMiB;
// What the host has room for beside what rests there: gradients on their way, to and from NVMe.
constexpr double kHostRoom = 32 * kMiB;
constexpr double kHostMargin = 8 * kMiB;  // staging, and rounding to granules
constexpr double kOther = 0.65;           // of the bounding term, what the others are to take
constexpr double kBalanced = 0.92;        // of the computation, what the others are to take in the balanced case
constexpr double kCores = 0.4;            // of the bounding term, what the cores may have to do
// Link and drive are no faster than what this machine does while it does other things, and while its speed drifts.
constexpr double kMostLink = 2e9;
constexpr double kLinkOfCopy = 0.38;
constexpr double kDriveOfBare = 0.7;
constexpr int kTimedSteps = 4;
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

/// Bytes that a step has to move. Across the link parameters for forward and for backward, less what the device keeps
/// between the two (the update makes the forward's new), and gradients once. To NVMe the gradients in backward, and
/// back for the update before the next forward, less what the host has room to keep.
struct Necessary {
  explicit Necessary(double elements) {
    const double parameters = kElementBytes * elements;
    in = 2 * parameters - std::min(parameters, kDeviceBytes);
    out = parameters;
    nvme_read = nvme_written = std::max(0.0, parameters - kHostRoom);
  }
  double on_nvme() const { return nvme_read + nvme_written; }
  double in;
  double out;
  double nvme_read;
  double nvme_written;
};

/// The independent loops, shared by calibration and rounds.
struct Loops {
  Loops(const std::filesystem::path& folder, const Necessary& bytes)
      : necessary(bytes), nvme(folder, whole(std::max(bytes.nvme_read, bytes.nvme_written))) {}

  /// Of a drive of that rate, or of the real one if that is slower.
  double nvme_seconds(double drive_rate) {
    const std::int64_t started_ns = monotonic_ns();
    nvme.seconds(whole(necessary.nvme_read), whole(necessary.nvme_written));
    sleep_until(started_ns + static_cast<std::int64_t>(necessary.on_nvme() / drive_rate * 1e9));
    return static_cast<double>(monotonic_ns() - started_ns) * 1e-9;
  }

  double core_seconds(double update_seconds) {
    const double copies = bare.copy_seconds(whole(necessary.in + necessary.out));
    const double checksums = bare.checksum_seconds(whole(necessary.on_nvme()));
    const double gradients = bare.fill_seconds(whole(necessary.out));
    return (update_seconds + copies + checksums + gradients) / hardware_cores();
  }

  Terms measure(StandIn& model, const Setting& setting) {
    Terms terms;
    terms[Term::compute] = model.bare_compute_seconds();
    terms[Term::host_to_device] = bare.link_seconds(whole(necessary.in), setting.link_rate);
    terms[Term::device_to_host] = bare.link_seconds(whole(necessary.out), setting.link_rate);
    terms[Term::nvme] = nvme_seconds(setting.drive_rate);
    terms[Term::update] = bare.update_seconds(static_cast<std::uint64_t>(model.elements()));
    terms[Term::cores] = core_seconds(terms[Term::update]);
    return terms;
  }

  static std::uint64_t whole(double bytes) { return static_cast<std::uint64_t>(bytes); }

  const Necessary necessary;
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
  std::vector<double> nvme_times;
  std::vector<double> copy_rates;
  std::vector<double> core_times;
  for (int round = 0; round < 5; ++round) {
    nvme_times.push_back(loops.nvme_seconds(/*drive_rate=*/1e12));
    copy_rates.push_back(measured_copy_rate());
    core_times.push_back(loops.core_seconds(loops.bare.update_seconds(static_cast<std::uint64_t>(model.elements()))));
  }
  const double most_link = std::min(kMostLink, kLinkOfCopy * median_of(copy_rates));
  const double step = std::max({loops.necessary.in / most_link / link, median_of(nvme_times) / kDriveOfBare / nvme,
                                median_of(core_times) / kCores});
  return {.compute_seconds = step * weight_of(Bound::compute, bound),
          .link_rate = std::floor(loops.necessary.in / (step * link)),
          .drive_rate = std::floor(loops.necessary.on_nvme() / (step * nvme))};
}

Config config_of(double elements, const Setting& setting, const std::filesystem::path& nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  const double parameters = kElementBytes * elements;
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.device.link = whole(setting.link_rate);
  config.host.memory = whole(3 * parameters + kHostRoom + kHostMargin);  // parameters and both moments rest there
  config.nvme.paths = {nvme};
  config.nvme.memory = whole(parameters * 1.2 + 64 * kMiB);
  config.placement.parameters = Config::Shares{.host = 1};
  config.placement.gradients = Config::Shares{.nvme = 1};
  config.placement.optimizer = Config::Shares{.host = 1};
  config.placement.activations = "keep";
  config.log.level = LogLevel::warning;
  config.validate();
  return config;
}

std::string in_words(double elements, const Setting& setting) {
  std::array<char, 200> text;
  std::snprintf(
      text.data(), text.size(),
      "%.1fM fp32 parameters, gradients on NVMe, device %.0f MiB, host room %.0f MiB, link %.2f GB/s, drive %.2f GB/s, "
      "compute %.0f ms",
      elements / 1e6, kDeviceBytes / kMiB, kHostRoom / kMiB, setting.link_rate / 1e9, setting.drive_rate / 1e9,
      1e3 * setting.compute_seconds);
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
  Steps(const std::vector<RecordedUse>& uses, double elements, const Setting& setting,
        const std::filesystem::path& nvme)
      : drives_(setting.drive_rate), session_(config_of(elements, setting, nvme)) {
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
    std::array<char, 120> text;
    std::snprintf(text.data(), text.size(),
                  "; the program is %.0f ms in forward, %.0f in backward, %.0f in step(), and "
                  "waits %.0f for the device",
                  median_of(forward_ms_), median_of(backward_ms_), median_of(update_ms_), median_of(waited_ms_));
    return text.data();
  }

 private:
  void step() {
    const std::int64_t start_ns = monotonic_ns();
    const at::Tensor loss = stand_in_->forward();
    const std::int64_t forward_ns = monotonic_ns();
    loss.backward();
    const std::int64_t backward_ns = monotonic_ns();
    optimizer_->step();
    optimizer_->zero_grad();
    const std::int64_t update_ns = monotonic_ns();
    EmulatedComputation::of_this_process().wait();  // as whoever reads the loss does
    const auto value = loss.item<float>();
    if (loss_ && *loss_ != value) {
      throw LogicError("bench: the sum over the parameters changed from " + std::to_string(*loss_) + " to " +
                       std::to_string(value) + ", and nothing has changed them");
    }
    loss_ = value;
    forward_ms_.push_back(static_cast<double>(forward_ns - start_ns) * 1e-6);
    backward_ms_.push_back(static_cast<double>(backward_ns - forward_ns) * 1e-6);
    update_ms_.push_back(static_cast<double>(update_ns - backward_ns) * 1e-6);
    waited_ms_.push_back(static_cast<double>(monotonic_ns() - update_ns) * 1e-6);
  }

  const PacedDrives drives_;
  Session session_;
  std::optional<AdamW> optimizer_;
  std::optional<StandIn> stand_in_;
  std::optional<float> loss_;
  StepTraffic traffic_;
  std::vector<double> forward_ms_, backward_ms_, update_ms_, waited_ms_;  // by step
};

/// Nothing where the rates have drifted so that the case is not what its name says, and `may_give_up`.
std::optional<BenchCase> measure(Bound bound, const std::vector<RecordedUse>& uses, const Setting& setting,
                                 const std::filesystem::path& nvme, Loops& loops, PairOptions options, double elements,
                                 bool may_give_up) {
  Steps steps(uses, elements, setting, nvme);
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
        rounds.push_back(loops.measure(steps.stand_in(), setting));
        floors.push_back(rounds.back().floor_seconds());
        return floors.back();
      });
  BenchCase result;
  if (comparison.ratios.empty()) return result;
  if (drifted) return std::nullopt;
  result.terms = Terms::median_of(rounds);
  result.as_defined = is_as_defined(bound, result.terms);
  if (!*result.as_defined && may_give_up && !stopped()) return std::nullopt;
  result.setting = in_words(elements, setting) + steps.phases_in_words();
  result.seconds = median_of(seconds);
  result.floor_seconds = median_of(floors);
  result.ratio = comparison.ratio;
  result.bound_by = term_names[static_cast<std::size_t>(result.terms.largest())];
  steps.traffic().report(result);
  const Necessary& necessary = loops.necessary;
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
  const auto elements = static_cast<double>(unmanaged.elements());
  Loops loops(nvme, Necessary(elements));
  for (int attempt = 1;; ++attempt) {
    const Setting setting = calibrate(bound, unmanaged, loops);
    const auto measured =
        measure(bound, uses, setting, nvme, loops, options, elements, /*may_give_up=*/attempt < kCalibrations);
    if (measured) return *measured;
    std::fprintf(stderr, "  the rates have drifted: calibrating again\n");
  }
}

}  // namespace terrace
