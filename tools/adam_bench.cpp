#include "tools/adam_bench.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/units.h"
#include "tools/bench_report.h"
#include "tools/formatted.h"
#include "tools/interrupt.h"
#include "tools/paired.h"
#include "tools/text_table.h"
#include "tools/update_arrays.h"
#include "tools/update_traffic.h"

namespace terrace {
namespace {

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 1;

/// A round lasts no less, so that clocks and threads that wake do not count.
constexpr double kLeastSeconds = 0.02;

/// Of the loop's speed, on all threads and with so many parameters that memory sets the pace.
constexpr Target kTarget{Target::Sense::at_least, 0.95};
constexpr std::uint64_t kLeastParametersOfTarget = 48ULL << 20U;

struct Format {
  const char* name;
  ElementType parameter;
  ElementType gradient;
  StateFormat states;
};

constexpr ElementType kFloat = ElementType::float32;
constexpr ElementType kBfloat16 = ElementType::bfloat16;
constexpr Format kFormats[] = {
    {"fp32, states float32", kFloat, kFloat, StateFormat::float32},
    {"fp32, states split_bfloat16", kFloat, kFloat, StateFormat::split_bfloat16},
    {"bf16, states float32", kBfloat16, kBfloat16, StateFormat::float32},
    {"bf16, states split", kBfloat16, kBfloat16, StateFormat::split},
    {"bf16, states split_bfloat16", kBfloat16, kBfloat16, StateFormat::split_bfloat16},
    // As gradients are with optimizer.accumulate = "float32".
    {"bf16, fp32 gradients, states float32", kBfloat16, kFloat, StateFormat::float32},
    {"bf16, fp32 gradients, states split", kBfloat16, kFloat, StateFormat::split},
    {"bf16, fp32 gradients, states split_bfloat16", kBfloat16, kFloat, StateFormat::split_bfloat16},
};

struct Case {
  Format format;
  std::uint64_t parameters;
  int threads;
  bool has_target;
  std::size_t bytes_per_parameter;
  std::vector<double> update;    // seconds, by round
  std::vector<double> roofline;  // seconds, by round

  double rate(const std::vector<double>& seconds) const { return static_cast<double>(parameters) / median_of(seconds); }
  double gigabytes(const std::vector<double>& seconds) const {
    return 1e-9 * rate(seconds) * static_cast<double>(bytes_per_parameter);
  }
  Interval fraction() const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < update.size(); ++i) ratios.push_back(roofline[i] / update[i]);
    return median_interval(ratios);
  }
  /// The rounds are what they are: what they leave open is missed.
  Verdict verdict() const { return has_target ? judge_finally(fraction(), kTarget) : Verdict::none; }
  std::string name() const {
    std::string count = format_bytes_exactly(parameters);
    count.pop_back();  // they are no bytes: 48Mi
    return std::string(format.name) + ", " + count + ", " + std::to_string(threads) +
           (threads == 1 ? " thread" : " threads");
  }
};

template <class Work>
double seconds_of(int repetitions, Work&& work) {
  const Stopwatch watch;
  for (int i = 0; i < repetitions; ++i) work();
  return watch.elapsed_seconds() / repetitions;
}

/// Nothing where there was an interrupt before its end.
std::optional<Case> measure(const Format& format, std::uint64_t parameters, int thread_count, bool is_all_threads,
                            int rounds, const Interrupt& interrupt) {
  const UpdateThreads threads(thread_count);
  const UpdateArrays arrays(format.parameter, format.gradient, format.states, static_cast<std::size_t>(parameters));
  Case result{.format = format,
              .parameters = parameters,
              .threads = thread_count,
              .has_target = is_all_threads && parameters >= kLeastParametersOfTarget,
              .bytes_per_parameter = arrays.bytes_per_parameter(),
              .update = {},
              .roofline = {}};
  const auto update = [&] { arrays.update(threads); };
  const auto without_arithmetic = [&] { pass_over(arrays.run(), threads); };
  update();
  const double once = seconds_of(1, update);
  const int repetitions = std::max(1, static_cast<int>(kLeastSeconds / once));
  for (int round = 0; round < rounds; ++round) {
    if (interrupt.requested()) return std::nullopt;
    // Who comes first changes, as a machine's speed drifts.
    if (round % 2 == 0) result.update.push_back(seconds_of(repetitions, update));
    result.roofline.push_back(seconds_of(repetitions, without_arithmetic));
    if (round % 2 == 1) result.update.push_back(seconds_of(repetitions, update));
  }
  return result;
}

nlohmann::ordered_json to_json(const Case& each) {
  nlohmann::ordered_json json;
  json["name"] = each.name();
  json["parameters"] = each.parameters;
  json["threads"] = each.threads;
  json["gparams_per_second"] = 1e-9 * each.rate(each.update);
  json["bytes_per_param"] = each.bytes_per_parameter;
  json["gb_per_second"] = each.gigabytes(each.update);
  json["roofline_gb_per_second"] = each.gigabytes(each.roofline);
  json["fraction"] = interval_json(each.fraction());
  if (each.has_target) json["target"] = target_json("fraction", kTarget);
  json["verdict"] = name_of(each.verdict());
  return json;
}

std::string to_text(const std::vector<Case>& cases) {
  std::vector<std::vector<std::string>> rows{{"", "Gparams/s", "B/param", "GB/s", "roofline", "fraction", "target"}};
  for (const Case& each : cases) {
    const Interval fraction = each.fraction();
    rows.push_back({each.name(), formatted("%.3f", 1e-9 * each.rate(each.update)),
                    std::to_string(each.bytes_per_parameter), formatted("%.1f", each.gigabytes(each.update)),
                    formatted("%.1f", each.gigabytes(each.roofline)),
                    formatted("%.3f (%.3f to %.3f)", fraction.median, fraction.low, fraction.high),
                    each.has_target ? judged("fraction", kTarget, each.verdict()) : "-"});
  }
  return format_table(rows);
}

void print(const std::vector<Case>& cases, int all_threads, const BenchAdamOptions& options) {
  if (!options.json) {
    std::fputs(to_text(cases).c_str(), stdout);
    return;
  }
  std::vector<nlohmann::ordered_json> list;
  for (const Case& each : cases) list.push_back(to_json(each));
  std::printf("%s\n", bench_json(kVersion, all_threads, {{"instruction_set", adamw_instruction_set()}}, list).c_str());
}

}  // namespace

bool bench_adam(const BenchAdamOptions& options) {
  const int all = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  std::vector<int> thread_counts{1};
  if (all > 1) thread_counts.push_back(all);
  const Interrupt interrupt;
  std::vector<Case> cases;
  for (const Format& format : kFormats) {
    for (const std::uint64_t parameters : options.parameters) {
      for (const int threads : thread_counts) {
        if (interrupt.requested()) break;
        std::optional<Case> measured = measure(format, parameters, threads, threads == all, options.rounds, interrupt);
        if (!measured) break;
        cases.push_back(std::move(*measured));
        if (!options.json) std::fprintf(stderr, "bench: %s\n", cases.back().name().c_str());
      }
    }
  }
  print(cases, all, options);
  return !interrupt.requested();
}

}  // namespace terrace
