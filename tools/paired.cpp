#include "tools/paired.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>

#include "base/error.h"

namespace terrace {
namespace {

constexpr double kTolerance = 0.02;
constexpr std::size_t kResamples = 10'000;
constexpr std::uint64_t kSeed = 20'240'229;

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) throw LogicError("the median of no values");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return values.size() % 2 == 1 ? *middle : (*middle + *std::max_element(values.begin(), middle)) / 2;
}

Interval median_interval(std::span<const double> values) {
  Interval interval;
  interval.median = median_of({values.begin(), values.end()});
  std::mt19937_64 generator(kSeed);
  std::vector<double> medians(kResamples);
  std::vector<double> resample(values.size());
  for (double& median : medians) {
    for (double& value : resample) value = values[generator() % values.size()];
    median = median_of(resample);
  }
  std::sort(medians.begin(), medians.end());
  interval.low = medians[kResamples / 40];  // 2.5%
  interval.high = medians[kResamples - 1 - kResamples / 40];
  return interval;
}

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::met:
      return "met";
    case Verdict::missed:
      return "missed";
    case Verdict::undecided:
      return "undecided";
    case Verdict::none:
      break;
  }
  return "none";
}

Verdict judge(const Interval& interval, const Target& target) {
  if (target.sense == Target::Sense::at_least) {
    if (interval.low >= target.value - kTolerance) return Verdict::met;
    return interval.high < target.value ? Verdict::missed : Verdict::undecided;
  }
  if (interval.high <= target.value + kTolerance) return Verdict::met;
  return interval.low > target.value ? Verdict::missed : Verdict::undecided;
}

Verdict judge_finally(const Interval& interval, const Target& target) {
  const Verdict verdict = judge(interval, target);
  return verdict == Verdict::undecided ? Verdict::missed : verdict;
}

Comparison compare_in_pairs(const PairOptions& options, const std::function<double()>& first,
                            const std::function<double()>& second) {
  Comparison result;
  const auto pair = [&] {
    double of_first = 0;
    double of_second = 0;
    if (result.ratios.size() % 2 == 0) {
      of_first = first();
      of_second = second();
    } else {
      of_second = second();
      of_first = first();
    }
    result.ratios.push_back(of_first / of_second);
    return std::vector<double>{result.ratios.back()};
  };
  const auto judge_ratio = [&](const std::vector<Interval>& ratio) {
    return options.target ? judge(ratio.front(), *options.target) : Verdict::none;
  };
  const RoundsComparison pairs = compare_in_rounds(options, pair, judge_ratio);
  if (pairs.rounds == 0) return result;
  result.ratio = pairs.figures.front();
  result.verdict = pairs.verdict;
  return result;
}

RoundsComparison compare_in_rounds(const PairOptions& options, const std::function<std::vector<double>()>& round,
                                   const std::function<Verdict(const std::vector<Interval>&)>& judge_all) {
  RoundsComparison result;
  std::vector<std::vector<double>> values;  // by figure
  int wanted = options.pairs;
  while (true) {
    for (; result.rounds < wanted && !options.stop(); ++result.rounds) {
      const std::vector<double> seen = round();
      values.resize(seen.size());
      for (std::size_t i = 0; i < seen.size(); ++i) values[i].push_back(seen[i]);
    }
    if (result.rounds == 0) return result;
    result.figures.clear();
    for (const std::vector<double>& each : values) result.figures.push_back(median_interval(each));
    result.verdict = judge_all(result.figures);
    if (result.verdict != Verdict::undecided) return result;
    if (result.rounds < wanted || wanted >= options.most_pairs) {
      result.verdict = Verdict::missed;
      return result;
    }
    wanted = std::min(2 * wanted, options.most_pairs);
  }
}

}  // namespace terrace
