/// Paired comparisons: two sides take turns in one process, so that a machine whose speed drifts slows both.
///
/// The figure is the median of the pairs' ratios, with a bootstrap 95% interval (Efron, "Bootstrap Methods: Another
/// Look at the Jackknife", 1979). Pure arithmetic but for the two that compare, which call what they are given.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace terrace {

struct Interval {
  double low = 0;
  double median = 0;
  double high = 0;
};

/// Half the sum of the middle two where their number is even. Throws LogicError if there are none.
double median_of(std::vector<double> values);

/// The median and the interval that holds 95% of the medians of resamples. The same values give the same interval.
/// Throws LogicError if there are none.
Interval median_interval(std::span<const double> values);

/// What a ratio should be.
struct Target {
  enum class Sense { at_least, at_most };
  Sense sense = Sense::at_most;
  double value = 1;
};

enum class Verdict { none, met, missed, undecided };
const char* name_of(Verdict verdict);

/// At least: met when the lower end is no more than 0.02 under the target, missed when the upper end is below it, and
/// undecided between. At most is the mirror image.
Verdict judge(const Interval& interval, const Target& target);
/// The same where nothing more is measured: what is undecided has missed.
Verdict judge_finally(const Interval& interval, const Target& target);

struct Comparison {
  std::vector<double> ratios;  ///< first side over second side, by pair
  Interval ratio;
  Verdict verdict = Verdict::none;  ///< never undecided
};

struct PairOptions {
  int pairs = 30;
  int most_pairs = 120;
  std::optional<Target> target{};
  /// Asked before each pair; what is measured by then counts.
  std::function<bool()> stop = [] { return false; };
};

/// Runs the sides as ABBA; each returns what it measured. While the verdict is undecided the pairs are doubled, up to
/// `most_pairs`; what is undecided then has missed. No ratios, and no verdict, if it was stopped before the first.
Comparison compare_in_pairs(const PairOptions& options, const std::function<double()>& first,
                            const std::function<double()>& second);

struct RoundsComparison {
  std::vector<Interval> figures;    ///< by figure
  Verdict verdict = Verdict::none;  ///< never undecided
  int rounds = 0;
};

/// The same for more sides than two: each round gives the value that it has seen of every figure, and `judge_all` looks
/// at the figures; the options' target is not used.
RoundsComparison compare_in_rounds(const PairOptions& options, const std::function<std::vector<double>()>& round,
                                   const std::function<Verdict(const std::vector<Interval>&)>& judge_all);

}  // namespace terrace
