/// What benches with named cases have in common: which of them are wanted, and one after the other until Ctrl-C.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/paired.h"

namespace terrace {

/// Fewer pairs, or rounds, are a first look.
inline constexpr int pairs_of_a_figure = 30;

/// What a bench is asked for.
struct CaseOptions {
  std::vector<std::string> cases;  ///< by name; none: all
  int pairs = pairs_of_a_figure;   ///< or rounds; doubled while a verdict is open, but for a first look
  bool json = false;
};

/// Those of `cases`, each of which has a `name`.
template <typename Case>
std::vector<std::string> names_of(const std::vector<Case>& cases) {
  std::vector<std::string> names;
  for (const Case& each : cases) names.push_back(each.name);
  return names;
}

/// Whether each of `known` is wanted. Throws ConfigError, which lists them, if another is.
std::vector<bool> which_are_wanted(const std::vector<std::string>& known, const std::vector<std::string>& wanted);

/// The wanted ones in the order of `all`. Throws ConfigError for a name that none has.
template <typename Case>
std::vector<Case> wanted_cases(const std::vector<Case>& all, const CaseOptions& options) {
  const std::vector<bool> is_wanted = which_are_wanted(names_of(all), options.cases);
  std::vector<Case> cases;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (is_wanted[i]) cases.push_back(all[i]);
  }
  return cases;
}

/// Calls `run` with each case's place in `names`, until Ctrl-C, which `run` hears of by its options. Returns false if
/// there was one. Makes the process's timers exact.
bool run_cases(const std::vector<std::string>& names, const CaseOptions& options,
               const std::function<void(std::size_t, const PairOptions&)>& run);

}  // namespace terrace
