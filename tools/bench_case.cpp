#include "tools/bench_case.h"

#include <algorithm>
#include <numeric>

namespace terrace {
namespace {

constexpr double kBoundMargin = 1.3;
constexpr double kComparable = 0.5;
constexpr double kBalance = 1.1;

}  // namespace

double Terms::link() const { return std::max((*this)[Term::host_to_device], (*this)[Term::device_to_host]); }

Term Terms::largest() const {
  return static_cast<Term>(std::max_element(seconds_.begin(), seconds_.end()) - seconds_.begin());
}

Terms Terms::median_of(const std::vector<Terms>& rounds) {
  Terms medians;
  for (std::size_t term = 0; term < term_count; ++term) {
    std::vector<double> seconds;
    for (const Terms& round : rounds) seconds.push_back(round.seconds_[term]);
    medians.seconds_[term] = terrace::median_of(std::move(seconds));
  }
  return medians;
}

bool is_as_defined(Bound bound, const Terms& terms) {
  // The link's directions are one thing, and so is what the cores have to do.
  const std::array<double, 3> main{terms[Term::compute], terms.link(), terms[Term::nvme]};
  const double rest = std::max({terms[Term::update], terms[Term::cores], terms[Term::memory]});
  if (bound == Bound::balanced) {
    const auto [least, most] = std::minmax_element(main.begin(), main.end());
    return *most <= kBalance * *least && rest <= *most;
  }
  const double bounding = main[static_cast<std::size_t>(bound)];
  double next = rest;
  int comparable = rest >= kComparable * bounding ? 1 : 0;
  for (std::size_t i = 0; i < main.size(); ++i) {
    if (i == static_cast<std::size_t>(bound)) continue;
    next = std::max(next, main[i]);
    comparable += main[i] >= kComparable * bounding ? 1 : 0;
  }
  return bounding >= kBoundMargin * next && comparable >= 2;
}

std::optional<double> BenchCase::bytes_ratio() const {
  const auto sum = [](const LinkBytes& bytes) { return std::accumulate(bytes.begin(), bytes.end(), 0.0); };
  const double necessary = sum(necessary_bytes);
  return necessary > 0 ? std::optional(sum(bytes_moved) / necessary) : std::nullopt;
}

void BenchCase::judge_also(std::string_view figure, const Interval& value, const Target& figure_target) {
  also_judged.push_back({figure, value, figure_target, judge_finally(value, figure_target)});
}

std::optional<double> median_ratio(const std::vector<BenchCase>& cases) {
  std::vector<double> ratios;
  for (const BenchCase& each : cases) {
    if (each.target && !each.retained) ratios.push_back(each.ratio.median);
  }
  return ratios.empty() ? std::nullopt : std::optional(median_of(ratios));
}

void StepTraffic::add(const MemoryUsage& before, const MemoryUsage& after, int steps) {
  for (const Link link : all_links) {
    for (const Kind kind : all_kinds) {
      moved_[index_of(link)][index_of(kind)] += static_cast<double>(after.moved(link, kind) - before.moved(link, kind));
    }
  }
  stall_seconds_ += after.stall_seconds - before.stall_seconds;
  demand_fetches_ += static_cast<double>(after.demand_fetches - before.demand_fetches);
  steps_ += steps;
}

double StepTraffic::moved(Link link) const {
  const auto& by_kind = moved_[index_of(link)];
  return std::accumulate(by_kind.begin(), by_kind.end(), 0.0) / steps_;
}

void StepTraffic::report(BenchCase& into) const {
  for (const Link link : all_links) {
    into.bytes_moved[index_of(link)] = moved(link);
    for (const Kind kind : all_kinds) {
      into.bytes_moved_by_kind[index_of(link)][index_of(kind)] = moved_[index_of(link)][index_of(kind)] / steps_;
    }
  }
  into.stall_seconds = stall_seconds_ / steps_;
  into.demand_fetches = demand_fetches_ / steps_;
}

}  // namespace terrace
