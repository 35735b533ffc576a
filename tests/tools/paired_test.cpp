#include "tools/paired.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

constexpr Target at_least_97{Target::Sense::at_least, 0.97};
constexpr Target at_most_125{Target::Sense::at_most, 1.25};

TEST(Paired, takes_the_middle_value_or_the_mean_of_the_middle_two) {
  EXPECT_EQ(median_of({3, 1, 2}), 2);
  EXPECT_EQ(median_of({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median_of({7}), 7);
  EXPECT_THROW(median_of({}), LogicError);
  EXPECT_THROW(median_interval({}), LogicError);
}

TEST(Paired, gives_the_same_interval_for_the_same_values) {
  const std::vector<double> values{1.0, 1.2, 0.9, 1.1, 1.3, 0.8, 1.05};
  const Interval interval = median_interval(values);
  const Interval again = median_interval(values);
  EXPECT_EQ(interval.median, 1.05);
  EXPECT_EQ(interval.low, again.low);
  EXPECT_EQ(interval.high, again.high);
  EXPECT_GE(interval.low, 0.8);
  EXPECT_LT(interval.low, 1.05);
  EXPECT_GT(interval.high, 1.05);
  EXPECT_LE(interval.high, 1.3);
}

TEST(Paired, holds_the_true_median_about_as_often_as_it_says) {
  std::mt19937_64 generator(11);
  std::normal_distribution<double> normal(1.0, 0.1);
  int held = 0;
  for (int experiment = 0; experiment < 100; ++experiment) {
    std::vector<double> values(30);
    for (double& value : values) value = normal(generator);
    const Interval interval = median_interval(values);
    held += interval.low <= 1.0 && 1.0 <= interval.high ? 1 : 0;
  }
  EXPECT_GE(held, 87);
  EXPECT_LT(held, 100);
}

TEST(Paired, narrows_the_interval_with_more_values) {
  std::mt19937_64 generator(5);
  std::normal_distribution<double> normal(1.0, 0.1);
  std::vector<double> values(400);
  for (double& value : values) value = normal(generator);
  const Interval few = median_interval(std::vector<double>(values.begin(), values.begin() + 20));
  const Interval many = median_interval(values);
  EXPECT_LT(many.high - many.low, (few.high - few.low) / 2);
}

TEST(Paired, judges_an_at_least_target_by_the_ends_of_the_interval) {
  EXPECT_EQ(judge({0.96, 0.98, 0.99}, at_least_97), Verdict::met);
  EXPECT_EQ(judge({0.9501, 0.951, 0.96}, at_least_97), Verdict::met);  // within two points
  EXPECT_EQ(judge({0.94, 0.96, 0.98}, at_least_97), Verdict::undecided);
  EXPECT_EQ(judge({0.94, 0.95, 0.969}, at_least_97), Verdict::missed);
}

TEST(Paired, judges_an_at_most_target_as_the_mirror_image) {
  EXPECT_EQ(judge({1.1, 1.2, 1.26}, at_most_125), Verdict::met);
  EXPECT_EQ(judge({1.2, 1.24, 1.28}, at_most_125), Verdict::undecided);
  EXPECT_EQ(judge({1.26, 1.27, 1.28}, at_most_125), Verdict::missed);
}

TEST(Paired, alternates_the_sides_as_abba) {
  std::string order;
  const Comparison comparison = compare_in_pairs(
      {.pairs = 4},
      [&] {
        order += 'a';
        return 3.0;
      },
      [&] {
        order += 'b';
        return 2.0;
      });
  EXPECT_EQ(order, "abbaabba");
  EXPECT_EQ(comparison.ratio.median, 1.5);
  EXPECT_EQ(comparison.ratios.size(), 4U);
  EXPECT_EQ(comparison.verdict, Verdict::none);
}

TEST(Paired, doubles_the_pairs_while_undecided_and_then_counts_it_as_missed) {
  int turn = 0;
  const auto swinging = [&] { return turn++ % 2 == 0 ? 1.0 : 1.5; };  // on either side of the target for ever
  const Comparison comparison =
      compare_in_pairs({.pairs = 30, .most_pairs = 100, .target = at_most_125}, swinging, [] { return 1.0; });
  EXPECT_EQ(comparison.ratios.size(), 100U);
  EXPECT_EQ(comparison.verdict, Verdict::missed);
}

TEST(Paired, stops_at_the_first_clear_verdict) {
  const auto run = [](double ratio) {
    return compare_in_pairs(
        {.pairs = 10, .target = at_most_125}, [&] { return ratio; }, [] { return 1.0; });
  };
  EXPECT_EQ(run(1.2).verdict, Verdict::met);
  EXPECT_EQ(run(1.3).verdict, Verdict::missed);
  EXPECT_EQ(run(1.3).ratios.size(), 10U);
}

TEST(Paired, ends_between_pairs_when_told_to) {
  int pairs = 0;
  const Comparison comparison = compare_in_pairs(
      {.pairs = 10, .stop = [&] { return pairs == 3; }},
      [&] {
        ++pairs;
        return 1.0;
      },
      [] { return 1.0; });
  EXPECT_EQ(comparison.ratios.size(), 3U);
  EXPECT_TRUE(compare_in_pairs(
                  {.stop = [] { return true; }}, [] { return 1.0; }, [] { return 1.0; })
                  .ratios.empty());
}

TEST(Rounds, are_doubled_until_all_figures_are_judged) {
  int calls = 0;
  const RoundsComparison comparison = compare_in_rounds(
      {.pairs = 2, .most_pairs = 16},
      [&] {
        ++calls;
        return std::vector<double>{1.0, static_cast<double>(calls)};
      },
      [&](const std::vector<Interval>& figures) {
        EXPECT_EQ(figures.size(), 2u);
        EXPECT_EQ(figures[0].median, 1.0);
        return calls < 8 ? Verdict::undecided : Verdict::met;
      });
  EXPECT_EQ(calls, 8);
  EXPECT_EQ(comparison.rounds, 8);
  EXPECT_EQ(comparison.verdict, Verdict::met);
  ASSERT_EQ(comparison.figures.size(), 2u);
  EXPECT_EQ(comparison.figures[1].median, 4.5);
}

TEST(Rounds, that_stay_open_to_the_last_have_missed) {
  int calls = 0;
  const RoundsComparison comparison = compare_in_rounds(
      {.pairs = 3, .most_pairs = 10},
      [&] {
        ++calls;
        return std::vector<double>{1.0};
      },
      [](const std::vector<Interval>&) { return Verdict::undecided; });
  EXPECT_EQ(calls, 10);
  EXPECT_EQ(comparison.verdict, Verdict::missed);
}

TEST(Rounds, stopped_before_the_first_give_no_figure) {
  const RoundsComparison comparison = compare_in_rounds(
      {.stop = [] { return true; }}, [] { return std::vector<double>{1.0}; },
      [](const std::vector<Interval>&) { return Verdict::met; });
  EXPECT_EQ(comparison.rounds, 0);
  EXPECT_TRUE(comparison.figures.empty());
  EXPECT_EQ(comparison.verdict, Verdict::none);
}

}  // namespace
}  // namespace terrace
