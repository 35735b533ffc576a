#include "tools/activation_bench.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <utility>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "offload/copy_rate.h"
#include "offload/nvme_paths.h"
#include "tools/activation_case.h"
#include "tools/bench_report.h"
#include "tools/formatted.h"
#include "tools/made_folders.h"
#include "tools/paired.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 2;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;
constexpr double kAutoOverBest = 1.05;
constexpr double kHiddenOverKeep = 1.02;
constexpr double kAddedOverCopies = 1.2;
constexpr double kResidentOverUnmanaged = 1.01;
constexpr double kMicrosecondsAnOp = 0.3;

/// What a case has shown.
struct Result {
  std::string name;
  std::string setting;              ///< in words
  std::vector<ActivationRun> runs;  ///< of each way, medians over the rounds
  std::string figure;               ///< what the intervals are of
  std::vector<std::pair<std::string, Interval>> ratios;
  std::string target;
  Verdict verdict = Verdict::none;
  int rounds = 0;
  std::optional<BestPlan> best;  ///< by exhaustive search
  double chosen_seconds = 0;     ///< of the plan that "auto" has made, as `play` has it
};

/// By way, what each round saw.
class Rounds {
 public:
  void add(ActivationRun run) { of(run.activations).push_back(std::move(run)); }
  double last_seconds(const std::string& way) const { return seen_.at(way).back().seconds; }
  double median_seconds(const std::string& way) const {
    std::vector<double> seconds;
    for (const ActivationRun& run : seen_.at(way)) seconds.push_back(run.seconds);
    return median_of(std::move(seconds));
  }
  /// The last of each, with the median of the seconds.
  std::vector<ActivationRun> summary() const {
    std::vector<ActivationRun> all;
    for (const std::string& way : order_) {
      all.push_back(seen_.at(way).back());
      all.back().seconds = median_seconds(way);
    }
    return all;
  }

 private:
  std::vector<ActivationRun>& of(const std::string& way) {
    if (!seen_.contains(way)) order_.push_back(way);
    return seen_[way];
  }

  std::vector<std::string> order_;
  std::map<std::string, std::vector<ActivationRun>> seen_;
};

/// Beside "auto": all that can run.
std::vector<std::string> fixed_ways(const ActivationSetting& setting) {
  std::vector<std::string> ways{"host", "nvme", "recompute"};
  if (saved_bytes(setting) <= setting.room_bytes) ways.emplace_back("keep");
  return ways;
}

std::string in_words(const ActivationSetting& setting) {
  double forward = 0;
  double backward = 0;
  for (const BlockProfile& block : setting.blocks) {
    forward += block.forward_seconds;
    backward += block.backward_seconds;
  }
  return formatted(
      "%zu blocks that save %.0f MiB, room for %.0f MiB, link %.2f GB/s, forward %.0f ms, backward %.0f ms",
      setting.blocks.size(), static_cast<double>(saved_bytes(setting)) / kMiB,
      static_cast<double>(setting.room_bytes) / kMiB, setting.link_rate * 1e-9, 1e3 * forward, 1e3 * backward);
}

Recomputed recomputed_by(const ActivationRun& run, std::size_t blocks) {
  Recomputed plan(blocks);
  if (run.report && !run.report->is_dropped && run.report->blocks.size() == blocks) {
    for (std::size_t i = 0; i < blocks; ++i) plan[i] = run.report->blocks[i] == BlockActivations::recompute;
  }
  return plan;
}

using JudgeAll = std::function<Verdict(const std::vector<Interval>&)>;

JudgeAll first_is_at_most(double value) {
  return [value](const std::vector<Interval>& ratios) {
    return judge(ratios.front(), {Target::Sense::at_most, value});
  };
}

/// Rounds, each of which gives the figures `names` in order, until there is a verdict. No rounds: it was stopped before
/// the first.
Result measured(const PairOptions& options, std::string figure, const std::vector<std::string>& names,
                const std::function<std::vector<double>()>& round, const JudgeAll& judge_all) {
  const RoundsComparison comparison = compare_in_rounds(options, round, judge_all);
  Result result;
  result.figure = std::move(figure);
  for (std::size_t i = 0; i < comparison.figures.size(); ++i)
    result.ratios.emplace_back(names[i], comparison.figures[i]);
  result.verdict = comparison.verdict;
  result.rounds = comparison.rounds;
  return result;
}

/// The plan against every fixed way. `beats_all`: it is to be faster than each, and otherwise near the best.
Result run_plan(const ActivationSetting& setting, bool beats_all, const std::filesystem::path& folder,
                const PairOptions& options) {
  Rounds rounds;
  bool backwards = false;
  const std::vector<std::string> others = fixed_ways(setting);
  std::vector<std::string> ways{"auto"};
  ways.insert(ways.end(), others.begin(), others.end());
  const auto round = [&] {
    std::vector<std::string> order = ways;
    if (std::exchange(backwards, !backwards)) std::reverse(order.begin(), order.end());
    for (const std::string& way : order) rounds.add(run_timed_blocks(setting, way, false, folder));
    std::vector<double> ratios;
    for (const std::string& way : others) {
      ratios.push_back(rounds.last_seconds("auto") / rounds.last_seconds(way));
    }
    return ratios;
  };
  const auto judge_all = [&](const std::vector<Interval>& ratios) {
    const auto highest = std::max_element(ratios.begin(), ratios.end(),
                                          [](const auto& one, const auto& other) { return one.median < other.median; });
    if (!beats_all) return judge(*highest, {Target::Sense::at_most, kAutoOverBest});
    return highest->high < 1 ? Verdict::met : highest->low > 1 ? Verdict::missed : Verdict::undecided;
  };
  Result result = measured(options, "auto over", others, round, judge_all);
  if (result.rounds == 0) return result;
  result.setting = in_words(setting);
  result.target = beats_all ? "all < 1" : formatted("all <= %.2f", kAutoOverBest);
  result.runs = rounds.summary();
  result.best = search_exhaustively(setting);
  result.chosen_seconds = play(profile_of(setting), recomputed_by(result.runs.front(), setting.blocks.size())).seconds;
  return result;
}

/// What leaves and comes back within half of backward, against a device that keeps all.
Result run_hidden(const ActivationSetting& setting, const std::filesystem::path& folder, const PairOptions& options) {
  Rounds rounds;
  const auto round = [&] {
    rounds.add(run_timed_blocks(setting, "keep", true, folder));
    rounds.add(run_timed_blocks(setting, "host", false, folder));
    return std::vector<double>{rounds.last_seconds("host") / rounds.last_seconds("keep")};
  };
  Result result = measured(options, "host over", {"keep"}, round, first_is_at_most(kHiddenOverKeep));
  result.setting = in_words(setting);
  result.target = formatted("<= %.2f", kHiddenOverKeep);
  result.runs = rounds.summary();
  return result;
}

/// A GPT that computes: what it takes longer, over what one core takes to copy what has moved.
Result run_real(const PairOptions& options) {
  GptBesideUnmanaged gpt(GptBesideUnmanaged::Activations::move);
  std::vector<double> managed;
  std::vector<double> unmanaged;
  double copy_rate = 0;
  const auto round = [&] {
    const bool managed_first = managed.size() % 2 == 0;
    if (managed_first) managed.push_back(gpt.managed_seconds());
    unmanaged.push_back(gpt.unmanaged_seconds());
    if (!managed_first) managed.push_back(gpt.managed_seconds());
    if (gpt.left_device_bytes() == 0 || gpt.reached_device_bytes() == 0) {
      throw LogicError("bench: no activation of the GPT has moved");
    }
    copy_rate = measured_copy_rate();
    const double copies = (gpt.left_device_bytes() + gpt.reached_device_bytes()) / copy_rate;
    return std::vector<double>{(managed.back() - unmanaged.back()) / copies};
  };
  Result result = measured(options, "added over", {"copies"}, round, first_is_at_most(kAddedOverCopies));
  if (result.rounds == 0) return result;
  result.setting =
      formatted("forward and backward of a GPT, half of whose activations move; copies of %.1f GB/s", copy_rate * 1e-9);
  result.target = formatted("<= %.1f", kAddedOverCopies);
  result.runs = {{.activations = "host",
                  .seconds = median_of(managed),
                  .left_device_bytes = gpt.left_device_bytes(),
                  .reached_device_bytes = gpt.reached_device_bytes()},
                 {.activations = "unmanaged", .seconds = median_of(unmanaged)}};
  return result;
}

/// A GPT all of which is on the device, with what is saved under management as it is by default.
Result run_resident(PairOptions options) {
  GptBesideUnmanaged gpt(GptBesideUnmanaged::Activations::stay);
  options.target = {Target::Sense::at_most, kResidentOverUnmanaged};
  std::vector<double> managed;
  std::vector<double> unmanaged;
  const Comparison comparison = compare_in_pairs(
      options, [&] { return managed.emplace_back(gpt.managed_seconds()); },
      [&] { return unmanaged.emplace_back(gpt.unmanaged_seconds()); });
  Result result;
  if (comparison.ratios.empty()) return result;
  result.setting = "forward and backward of a GPT that is on the device";
  result.figure = "managed over";
  result.ratios = {{"unmanaged", comparison.ratio}};
  result.target = formatted("<= %.2f", kResidentOverUnmanaged);
  result.verdict = comparison.verdict;
  result.rounds = static_cast<int>(comparison.ratios.size());
  result.runs = {{.activations = "auto", .seconds = median_of(managed)},
                 {.activations = "unmanaged", .seconds = median_of(unmanaged)}};
  return result;
}

Result run_interception(const PairOptions& options) {
  const auto round = [] {
    const InterceptionCost cost = measure_interception();
    return std::vector<double>{1e6 * cost.of_any_op, 1e6 * cost.of_managed_op};
  };
  const auto judge_all = [](const std::vector<Interval>& costs) {
    return costs.back().high <= kMicrosecondsAnOp ? Verdict::met
           : costs.back().low > kMicrosecondsAnOp ? Verdict::missed
                                                  : Verdict::undecided;
  };
  Result result = measured(options, "us added to", {"an op", "an op on what is managed"}, round, judge_all);
  result.setting = "ops on single numbers, against a callback that does nothing";
  result.target = formatted("<= %.1f us", kMicrosecondsAnOp);
  return result;
}

ActivationSetting alike(double link_rate, std::uint64_t room_bytes = 28 * kMiB) {
  return {.name = "",
          .blocks = std::vector<BlockProfile>(
              6, {.forward_seconds = 0.012, .backward_seconds = 0.024, .input_bytes = 0, .saved_bytes = 8 * kMiB}),
          .room_bytes = room_bytes,
          .link_rate = link_rate};
}

/// Of a link that what leaves, about half of what is saved, keeps busy each way for somewhat less than half of
/// backward: that is most of forward, within which it leaves.
constexpr double kHidingLink = 0.4e9;

/// Blocks that are quick and save much beside others that are slow and save little.
ActivationSetting mixed() {
  ActivationSetting setting{.name = "", .blocks = {}, .room_bytes = 28 * kMiB, .link_rate = 0.4e9};
  for (int i = 0; i < 3; ++i) {
    setting.blocks.push_back(
        {.forward_seconds = 0.004, .backward_seconds = 0.008, .input_bytes = 0, .saved_bytes = 16 * kMiB});
    setting.blocks.push_back(
        {.forward_seconds = 0.024, .backward_seconds = 0.048, .input_bytes = 0, .saved_bytes = 8 * kMiB});
  }
  return setting;
}

struct Case {
  std::string name;
  std::function<Result(const std::filesystem::path& folder, const PairOptions& options)> run;
};

const std::vector<Case>& all_cases() {
  static const auto plan = [](ActivationSetting setting, bool beats_all) {
    return [setting = std::move(setting), beats_all](const auto& folder, const auto& options) {
      return run_plan(setting, beats_all, folder, options);
    };
  };
  static const std::vector<Case> cases{
      {"slow-link", plan(alike(0.25e9), false)},
      {"medium-link", plan(alike(0.5e9), false)},
      {"fast-link", plan(alike(1e9), false)},
      {"all-fits", plan(alike(0.5e9, 96 * kMiB), false)},
      {"mixed", plan(mixed(), true)},
      {"hidden",
       [](const auto& folder, const auto& options) { return run_hidden(alike(kHidingLink), folder, options); }},
      {"real", [](const auto&, const auto& options) { return run_real(options); }},
      {"resident", [](const auto&, const auto& options) { return run_resident(options); }},
      {"interception", [](const auto&, const auto& options) { return run_interception(options); }},
  };
  return cases;
}

std::string blocks_in_letters(const ActivationReport& report) {
  std::string letters;
  for (const BlockActivations each : report.blocks) {
    letters += each == BlockActivations::keep ? 'k' : each == BlockActivations::offload ? 'o' : 'r';
  }
  return report.is_dropped ? letters + " (dropped)" : letters;
}

nlohmann::ordered_json to_json(const Result& result) {
  nlohmann::ordered_json json{{"name", result.name}, {"setting", result.setting}, {"rounds", result.rounds}};
  for (const ActivationRun& run : result.runs) {
    nlohmann::ordered_json one{{"seconds", run.seconds},
                               {"left_device_bytes", run.left_device_bytes},
                               {"reached_device_bytes", run.reached_device_bytes}};
    if (run.report) {
      one["plan"] = {
          {"blocks", blocks_in_letters(*run.report)},       {"predicted_seconds", run.report->predicted_seconds},
          {"predicted_bytes", run.report->predicted_bytes}, {"measured_bytes", run.left_device_bytes},
          {"seconds_before", run.report->seconds_before},   {"bytes_before", run.report->bytes_before}};
    }
    json["activations"][run.activations] = std::move(one);
  }
  for (const auto& [other, ratio] : result.ratios) json[result.figure + " " + other] = interval_json(ratio);
  if (result.best) {
    std::string letters;
    for (const bool again : result.best->recomputed) letters += again ? 'r' : '-';
    json["exhaustive_search"] = {{"blocks", letters},
                                 {"played_seconds", result.best->seconds},
                                 {"played_seconds_of_auto", result.chosen_seconds}};
  }
  json["target"] = result.target;
  json["verdict"] = name_of(result.verdict);
  return json;
}

std::string to_text(const std::vector<Result>& results) {
  std::string text;
  for (const Result& result : results) {
    text += result.name + ": " + result.setting + "\n";
    std::vector<std::vector<std::string>> rows{{"activations", "ms a step", "MiB out", "MiB in", "blocks"}};
    for (const ActivationRun& run : result.runs) {
      rows.push_back(
          {run.activations, formatted("%.1f", 1e3 * run.seconds), formatted("%.1f", run.left_device_bytes / kMiB),
           formatted("%.1f", run.reached_device_bytes / kMiB), run.report ? blocks_in_letters(*run.report) : ""});
      if (run.report) {
        rows.push_back({"  predicted", formatted("%.1f", 1e3 * run.report->predicted_seconds),
                        formatted("%.1f", static_cast<double>(run.report->predicted_bytes) / kMiB), "", ""});
      }
    }
    text += format_table(rows);
    for (const auto& [other, ratio] : result.ratios) {
      text += formatted("%s %s: %.3f [%.3f, %.3f]\n", result.figure.c_str(), other.c_str(), ratio.median, ratio.low,
                        ratio.high);
    }
    if (result.best) {
      text += formatted("shortest of all plans, played: %.1f ms; the chosen one: %.1f ms\n", 1e3 * result.best->seconds,
                        1e3 * result.chosen_seconds);
    }
    text += formatted("%s: %s, %d rounds\n\n", result.target.c_str(), name_of(result.verdict), result.rounds);
  }
  return text;
}

void print(const std::vector<Result>& results, const BenchActivationsOptions& options) {
  if (!options.json) {
    std::fputs(to_text(results).c_str(), stdout);
    return;
  }
  std::vector<nlohmann::ordered_json> list;
  for (const Result& result : results) list.push_back(to_json(result));
  std::printf("%s\n", bench_json(kVersion, at::get_num_threads(), {{"folder", options.folder.string()}}, list).c_str());
}

}  // namespace

std::vector<std::string> bench_activations_cases() { return names_of(all_cases()); }

bool bench_activations(const BenchActivationsOptions& options) {
  const std::vector<Case> cases = wanted_cases(all_cases(), options);
  const MadeFolders made({options.folder});
  make_nvme_folder(options.folder);
  std::vector<Result> results;
  const bool complete = run_cases(names_of(cases), options, [&](std::size_t i, const PairOptions& rounds) {
    Result result = cases[i].run(options.folder, rounds);
    if (result.rounds == 0) return;
    result.name = cases[i].name;
    results.push_back(std::move(result));
  });
  print(results, options);
  return complete;
}

}  // namespace terrace
