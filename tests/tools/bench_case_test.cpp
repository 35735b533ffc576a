#include "tools/bench_case.h"

#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tools/bench_report.h"

namespace terrace {
namespace {

Terms terms(double compute, double link, double nvme, double cores = 0) {
  Terms all;
  all[Term::compute] = compute;
  all[Term::host_to_device] = link;
  all[Term::device_to_host] = link / 2;
  all[Term::nvme] = nvme;
  all[Term::cores] = cores;
  return all;
}

TEST(BenchCase, is_bound_by_what_is_well_above_the_next_and_near_two_others) {
  EXPECT_TRUE(is_as_defined(Bound::compute, terms(1.3, 1.0, 0.65)));
  EXPECT_FALSE(is_as_defined(Bound::compute, terms(1.29, 1.0, 0.9)));  // too near the next
  EXPECT_FALSE(is_as_defined(Bound::compute, terms(1.3, 1.0, 0.6)));   // one other alone is near
  EXPECT_TRUE(is_as_defined(Bound::compute, terms(1.3, 1.0, 0.1, 0.7)));
  EXPECT_TRUE(is_as_defined(Bound::link, terms(0.6, 1.0, 0.6)));
  EXPECT_FALSE(is_as_defined(Bound::link, terms(1.0, 0.6, 0.6)));
  EXPECT_TRUE(is_as_defined(Bound::nvme, terms(0.6, 0.6, 1.0)));
  EXPECT_FALSE(is_as_defined(Bound::nvme, terms(0.6, 0.6, 1.0, 0.9)));
}

TEST(BenchCase, is_balanced_within_a_tenth_with_nothing_above) {
  EXPECT_TRUE(is_as_defined(Bound::balanced, terms(1.0, 1.09, 1.05, 0.5)));
  EXPECT_FALSE(is_as_defined(Bound::balanced, terms(1.0, 1.12, 1.05)));
  EXPECT_FALSE(is_as_defined(Bound::balanced, terms(1.0, 1.0, 1.0, 1.2)));
}

TEST(BenchCase, takes_the_median_of_each_term_and_the_largest_as_floor) {
  const Terms median = Terms::median_of({terms(1, 9, 2), terms(2, 4, 3), terms(9, 5, 1)});
  EXPECT_EQ(median[Term::compute], 2);
  EXPECT_EQ(median.link(), 5);
  EXPECT_EQ(median[Term::nvme], 2);
  EXPECT_EQ(median.largest(), Term::host_to_device);
  EXPECT_EQ(median.floor_seconds(), 5);
}

TEST(BenchCase, sets_the_bytes_of_all_links_against_what_is_necessary_on_all) {
  BenchCase of;
  EXPECT_EQ(of.bytes_ratio(), std::nullopt) << "nothing is necessary";
  of.necessary_bytes = {10, 20, 30, 40};
  of.bytes_moved = {12, 20, 33, 40};
  ASSERT_TRUE(of.bytes_ratio());
  EXPECT_DOUBLE_EQ(*of.bytes_ratio(), 1.05);
}

TEST(BenchCase, is_judged_by_further_figures_of_which_none_stays_undecided) {
  BenchCase of;
  const Target target{Target::Sense::at_most, 1.05};
  of.judge_also("bytes", {1.06, 1.06, 1.06}, target);
  of.judge_also("bytes", {1.08, 1.08, 1.08}, target);
  of.judge_also("wide", {1.00, 1.06, 1.2}, target);
  ASSERT_EQ(of.also_judged.size(), 3u);
  EXPECT_EQ(of.also_judged[0].verdict, Verdict::met) << "within the two points that a figure may vary by";
  EXPECT_EQ(of.also_judged[1].verdict, Verdict::missed);
  EXPECT_EQ(of.also_judged[2].verdict, Verdict::missed);
  const std::string json = to_json({of}, 1);
  EXPECT_NE(json.find("\"figure\": \"bytes\""), std::string::npos) << json;
}

TEST(BenchCase, of_several_has_the_median_of_those_held_to_a_ratio) {
  std::vector<BenchCase> cases(4);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    cases[i].ratio.median = 1.0 + static_cast<double>(i);
    cases[i].target = Target{Target::Sense::at_most, 1.15};
  }
  cases[3].retained = Interval{1, 1, 1};  // plain LibTorch is what it is held to
  EXPECT_EQ(median_ratio(cases), 2.0);
  EXPECT_EQ(median_ratio({cases[3]}), std::nullopt);
}

TEST(BenchCase, reports_traffic_as_means_of_a_step) {
  MemoryUsage before;
  MemoryUsage after;
  after.bytes_moved[index_of(Link::host_to_device)][index_of(Kind::parameter)] = 600;
  after.bytes_moved[index_of(Link::host_to_device)][index_of(Kind::gradient)] = 200;
  after.stall_seconds = 2;
  StepTraffic traffic;
  traffic.add(before, after, 4);
  BenchCase result;
  traffic.report(result);
  EXPECT_EQ(result.bytes_moved[index_of(Link::host_to_device)], 200);
  EXPECT_EQ(result.bytes_moved_by_kind[index_of(Link::host_to_device)][index_of(Kind::gradient)], 50);
  EXPECT_EQ(result.stall_seconds, 0.5);
}

TEST(BenchCase, says_where_a_case_is_not_what_its_name_says) {
  BenchCase result;
  result.name = "link-bound";
  result.target = Target{};
  result.verdict = Verdict::met;
  result.as_defined = false;
  EXPECT_NE(to_text({result}).find("not as defined"), std::string::npos);
  EXPECT_NE(to_json({result}, 1).find("\"as_defined\": false"), std::string::npos);
}

}  // namespace
}  // namespace terrace
