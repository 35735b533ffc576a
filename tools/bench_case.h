/// What a case of `terrace bench step` has measured, and the floor under it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/usage.h"
#include "tools/paired.h"

namespace terrace {

/// Each in seconds a step, had it the machine to itself; with full overlap a step takes the largest.
enum class Term : std::uint8_t { compute, host_to_device, device_to_host, nvme, update, cores, memory };
inline constexpr std::size_t term_count = 7;
inline constexpr std::array<std::string_view, term_count> term_names{"compute", "host→device", "device→host", "nvme",
                                                                     "update",  "cores",       "memory"};

class Terms {
 public:
  double& operator[](Term term) { return seconds_[static_cast<std::size_t>(term)]; }
  double operator[](Term term) const { return seconds_[static_cast<std::size_t>(term)]; }
  double link() const;  ///< the slower direction
  Term largest() const;
  double floor_seconds() const { return (*this)[largest()]; }

  /// Term by term.
  static Terms median_of(const std::vector<Terms>& rounds);

 private:
  std::array<double, term_count> seconds_{};
};

/// What its name says of a stand-in case.
enum class Bound : std::uint8_t { compute, link, nvme, balanced };

/// X-bound: X is at least 1.3 times the next term, and two others are at least half of it. Balanced: compute, link and
/// NVMe are within 10%, and nothing is above them.
bool is_as_defined(Bound bound, const Terms& terms);

/// Bytes a step by link.
using LinkBytes = std::array<double, link_count>;
using KindBytes = std::array<std::array<double, kind_count>, link_count>;

/// A figure that is held to a target besides the one that decides how many pairs are run.
struct JudgedFigure {
  std::string_view figure;
  Interval value;
  Target target;
  Verdict verdict = Verdict::none;  ///< never undecided: that is missed
};

struct BenchCase {
  std::string name;
  std::string setting;  ///< in words
  double seconds = 0;   ///< medians
  double floor_seconds = 0;
  Interval ratio;                              ///< of the two, by pairs
  std::optional<double> phased_floor_seconds;  ///< see step_phases.h
  std::optional<Interval> phased_ratio;
  std::string_view bound_by;
  Terms terms;
  std::optional<bool> as_defined;
  std::optional<double> unmanaged_seconds;
  std::optional<Interval> retained;
  LinkBytes bytes_moved{};
  KindBytes bytes_moved_by_kind{};
  LinkBytes necessary_bytes{};
  double stall_seconds = 0;   ///< a step
  double demand_fetches = 0;  ///< a step
  double stolen_share = 0;    ///< of the cores' time, while steps were timed, and
  double stolen_beside = 0;   ///< while what they are compared with was: see stolen_time.h
  std::size_t pairs = 0;
  std::optional<Target> target;  ///< of `retained` where there is one, otherwise of `ratio`
  Verdict verdict = Verdict::none;
  std::vector<JudgedFigure> also_judged;

  /// What all links moved over what is necessary on all of them; nothing where that is none.
  std::optional<double> bytes_ratio() const;
  void judge_also(std::string_view figure, const Interval& value, const Target& target);
};

/// The median of the cases' ratios to the floor, of those that are held to a target by it; nothing where there are
/// none.
std::optional<double> median_ratio(const std::vector<BenchCase>& cases);

/// What steps between two snapshots moved and waited for.
class StepTraffic {
 public:
  void add(const MemoryUsage& before, const MemoryUsage& after, int steps);
  /// Fills in the means of a step.
  void report(BenchCase& into) const;
  /// Bytes a step.
  double moved(Link link) const;

 private:
  KindBytes moved_{};
  double stall_seconds_ = 0;
  double demand_fetches_ = 0;
  double steps_ = 0;
};

}  // namespace terrace
