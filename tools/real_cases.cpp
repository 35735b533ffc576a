#include "tools/real_cases.h"

#include <array>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "integration/adamw.h"
#include "integration/pause.h"
#include "integration/session.h"
#include "offload/emulated_computation.h"
#include "tools/bare_loops.h"
#include "tools/bare_nvme.h"
#include "tools/bench_session.h"
#include "tools/gpt.h"
#include "tools/stand_in.h"
#include "tools/stolen_time.h"

namespace terrace {
namespace {

constexpr double kRetainedResident = 0.97;
constexpr double kRetainedNvme = 0.92;
constexpr double kRetainedWaited = 0.97;
constexpr Target kRatioTarget{Target::Sense::at_most, 1.2};  // to the floor, where computation is real
constexpr int kRealSteps = 5;                                // that tell how long is to be waited
constexpr std::int64_t kSequences = 8;                       // of 256 tokens: 2,048 a step
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kDeviceBytes = 8192 * kMiB;
constexpr double kHostRoom = 192 * kMiB;  // beside the states that rest there
constexpr double kStateBytes = 8;         // a parameter's

GptOptions model_options() { return {.layers = 12, .heads = 8, .width = 512, .sequence = 256}; }

Gpt make_model() {
  torch::manual_seed(1);
  return Gpt(model_options());
}

/// Of what is on NVMe a quarter, and parameters and half of the gradients on their way: with room for all of these,
/// states would stay in it from one step to the next. Where computation is only waited for, they go and come while it
/// lasts, and would leave all of it.
double host_bytes_beside_nvme(Computation computation, double parameters) {
  return (kStateBytes / 4 + (computation == Computation::waited ? 0 : 4 + 2)) * parameters;
}

Config config_of(StatesRest states, Computation computation, double parameters, const std::filesystem::path& nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.placement.parameters = Config::Shares{.device = 1};
  config.placement.gradients = Config::Shares{.device = 1};
  config.placement.activations = "keep";
  config.log.level = LogLevel::warning;
  if (states == StatesRest::host) {
    config.host.memory = whole(16 * parameters + kHostRoom);
    config.placement.optimizer = Config::Shares{.host = 1};
  } else {
    config.host.memory = whole(host_bytes_beside_nvme(computation, parameters));
    config.placement.optimizer = Config::Shares{.nvme = 1};
    config.nvme.paths = {nvme};
    config.nvme.memory = whole(8 * parameters * 1.2 + 256 * kMiB);
  }
  config.validate();
  return config;
}

/// A step of either side, which sees the same tokens as the other side's step of the same number.
class Side {
 public:
  Side(Gpt model, Session& session)
      : model_(std::move(model)), optimizer_(session, torch::optim::AdamWOptions(3e-4)), is_managed_(true) {}
  explicit Side(Gpt model)
      : model_(std::move(model)),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(3e-4)),
        is_managed_(false) {}

  /// From now on computation is only waited for.
  void wait_instead(const std::vector<RecordedUse>& uses, double seconds) {
    stand_in_.emplace(model_, uses);
    stand_in_->set_compute_seconds(seconds);
  }

  /// Returns the loss.
  float step() { return stand_in_ ? waited_step() : computed_step(); }

  /// When the last step's backward ended.
  std::int64_t computed_ns() const { return computed_ns_; }

 private:
  float computed_step() {
    const std::int64_t sequence = model_options().sequence;
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 + steps_++));
    const at::Tensor tokens = at::randint(0, GptOptions::vocabulary, {kSequences, sequence + 1}, generator, at::kLong);
    const at::Tensor loss = model_->forward(tokens.narrow(1, 0, sequence), tokens.narrow(1, 1, sequence).contiguous());
    const auto value = loss.item<float>();
    loss.backward();
    computed_ns_ = monotonic_ns();
    optimizer_.step();
    optimizer_.zero_grad();
    return value;
  }

  float waited_step() {
    const at::Tensor loss = stand_in_->forward();
    loss.backward();
    if (!is_managed_) EmulatedComputation::of_this_process().wait();  // which gradients come from
    computed_ns_ = monotonic_ns();
    optimizer_.step();
    optimizer_.zero_grad();
    EmulatedComputation::of_this_process().wait();  // as whoever reads the loss does
    return loss.item<float>();
  }

  Gpt model_;
  AdamW optimizer_;
  const bool is_managed_;
  std::optional<StandIn> stand_in_;
  std::uint64_t steps_ = 0;
  std::int64_t computed_ns_ = 0;
};

/// What a step has to move, in bytes.
struct Necessary {
  Necessary(StatesRest states, double parameters)
      : link(4 * parameters), nvme(states == StatesRest::nvme ? 8 * parameters : 0) {}
  double link;  ///< each way: gradients out, and parameters in, which the host has updated
  double nvme;  ///< each way
};

Terms measure_terms(double compute_seconds, bool takes_cores, double parameters, const Necessary& necessary,
                    BareLoops& bare, BareNvme* nvme) {
  const auto whole = [](double bytes) { return static_cast<std::uint64_t>(bytes); };
  Terms terms;
  terms[Term::compute] = compute_seconds;
  terms[Term::host_to_device] = bare.copy_seconds(whole(necessary.link));
  terms[Term::device_to_host] = bare.copy_seconds(whole(necessary.link));
  terms[Term::nvme] = nvme != nullptr ? nvme->seconds(whole(necessary.nvme), whole(necessary.nvme)) : 0;
  terms[Term::update] = bare.update_seconds(whole(parameters));
  const double checksums = bare.checksum_seconds(whole(2 * necessary.nvme));
  const double cores = hardware_cores();
  terms[Term::cores] =
      (takes_cores ? terms[Term::compute] : 0) +
      (terms[Term::host_to_device] + terms[Term::device_to_host] + terms[Term::update] + checksums) / cores;
  // The update reads and writes 28 B a parameter; a byte copied, checked or moved to a drive is a byte read or written.
  const double bytes = 28 * parameters + 4 * necessary.link + 4 * necessary.nvme;
  terms[Term::memory] = bytes / bare.memory_rate();
  return terms;
}

void require_equal(float managed, float unmanaged, int step) {
  if (managed == unmanaged) return;
  std::array<char, 160> text;
  std::snprintf(text.data(), text.size(), "bench: the loss of step %d is %.9g with the session and %.9g without", step,
                static_cast<double>(managed), static_cast<double>(unmanaged));
  throw LogicError(text.data());
}

std::string in_words(double parameters, const Config& config, Computation computation) {
  std::array<char, 240> text;
  std::snprintf(text.data(), text.size(),
                "%.1fM parameters, %lld tokens a step, device %.0f MiB, host %.0f MiB, states on %s%s",
                parameters / 1e6, static_cast<long long>(kSequences * model_options().sequence), kDeviceBytes / kMiB,
                static_cast<double>(*config.host.memory) / kMiB, config.nvme.paths.empty() ? "the host" : "NVMe",
                computation == Computation::waited ? ", computation as long as real but only waited for" : "");
  return text.data();
}

double target_of(StatesRest states, Computation computation) {
  if (computation == Computation::waited) return kRetainedWaited;
  return states == StatesRest::host ? kRetainedResident : kRetainedNvme;
}

}  // namespace

BenchCase run_real_case(StatesRest states, Computation computation, const std::filesystem::path& nvme,
                        PairOptions options) {
  const ThreadsOfLibTorch all_cores(static_cast<int>(hardware_cores()));
  Gpt ordinary = make_model();
  double parameters = 0;
  for (const at::Tensor& parameter : ordinary->parameters()) parameters += static_cast<double>(parameter.numel());
  const Necessary necessary(states, parameters);
  BareLoops bare;
  std::optional<BareNvme> drive;
  if (states == StatesRest::nvme) drive.emplace(nvme, static_cast<std::uint64_t>(necessary.nvme));

  const bool is_waited = computation == Computation::waited;
  const std::vector<RecordedUse> uses = is_waited ? record_uses(model_options()) : std::vector<RecordedUse>();

  Side unmanaged(ordinary);
  const Config config = config_of(states, computation, parameters, nvme);
  Session session(config);
  return with_typed_errors(session, [&] {
    Gpt model = session.construct(make_model);
    session.manage(*model);
    Side managed(model, session);
    const auto unmanaged_step = [&] {
      const Pause pause;
      return unmanaged.step();
    };
    for (int step = 0; step < 2; ++step) require_equal(managed.step(), unmanaged_step(), step);
    session.synchronize();
    if (is_waited) {
      std::vector<double> real_seconds;
      for (int step = 0; step < kRealSteps; ++step) {
        const std::int64_t start_ns = monotonic_ns();
        unmanaged_step();
        managed.step();
        session.synchronize();
        real_seconds.push_back(static_cast<double>(unmanaged.computed_ns() - start_ns) * 1e-9);
      }
      for (Side* const side : {&unmanaged, &managed}) side->wait_instead(uses, median_of(real_seconds));
      for (int step = 0; step < 2; ++step) require_equal(managed.step(), unmanaged_step(), step);
      session.synchronize();
    }

    StepTraffic traffic;
    StolenTime stolen, stolen_beside;
    std::vector<double> managed_seconds;
    std::vector<double> unmanaged_seconds;
    std::vector<double> ratios;
    std::vector<Terms> rounds;
    options.target = Target{Target::Sense::at_least, target_of(states, computation)};
    const Comparison comparison = compare_in_pairs(
        options,
        [&] {
          std::int64_t start_ns = 0;
          unmanaged_seconds.push_back(stolen_beside.during([&] {
            start_ns = monotonic_ns();
            unmanaged_step();
            return static_cast<double>(monotonic_ns() - start_ns) * 1e-9;
          }));
          rounds.push_back(measure_terms(static_cast<double>(unmanaged.computed_ns() - start_ns) * 1e-9, !is_waited,
                                         parameters, necessary, bare, drive ? &*drive : nullptr));
          return unmanaged_seconds.back();
        },
        [&] {
          // Until a step waits for what the one before it left, as each does that follows others.
          for (int untimed = 0; untimed < 2; ++untimed) managed.step();
          const MemoryUsage before = session.memory_usage();
          managed_seconds.push_back(stolen.during([&] {
            const Stopwatch watch;
            managed.step();
            return watch.elapsed_seconds();
          }));
          traffic.add(before, session.memory_usage(), 1);
          session.synchronize();
          return managed_seconds.back();
        });
    BenchCase result;
    if (comparison.ratios.empty()) return result;
    std::vector<double> floors;
    for (std::size_t pair = 0; pair < comparison.ratios.size(); ++pair) {
      floors.push_back(rounds[pair].floor_seconds());
      ratios.push_back(managed_seconds[pair] / floors.back());
    }
    if (states == StatesRest::nvme) {
      for (const Link link : {Link::nvme_to_host, Link::host_to_nvme}) {
        if (traffic.moved(link) >= kStateBytes * parameters) continue;
        throw LogicError("bench: a step moved " + std::to_string(traffic.moved(link) / parameters) + " B a parameter " +
                         std::string(name_of(link)) + ", and the case is about at least 8");
      }
    }
    result.setting = in_words(parameters, config, computation);
    result.seconds = median_of(managed_seconds);
    result.floor_seconds = median_of(floors);
    result.ratio = median_interval(ratios);
    result.terms = Terms::median_of(rounds);
    result.bound_by = term_names[static_cast<std::size_t>(result.terms.largest())];
    result.unmanaged_seconds = median_of(unmanaged_seconds);
    result.retained = comparison.ratio;
    traffic.report(result);
    result.stolen_share = stolen.share();
    result.stolen_beside = stolen_beside.share();
    result.necessary_bytes = {necessary.nvme, necessary.nvme, necessary.link, necessary.link};
    result.pairs = comparison.ratios.size();
    result.target = options.target;
    result.verdict = comparison.verdict;
    if (!is_waited) result.judge_also("ratio", result.ratio, kRatioTarget);
    return result;
  });
}

}  // namespace terrace
