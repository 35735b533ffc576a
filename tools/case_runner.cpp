#include "tools/case_runner.h"

#include <algorithm>
#include <cstdio>
#include <sys/prctl.h>

#include "base/error.h"
#include "tools/interrupt.h"

namespace terrace {

std::vector<bool> which_are_wanted(const std::vector<std::string>& known, const std::vector<std::string>& wanted) {
  const auto is_one_of = [](const std::string& name, const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string& name : wanted) {
    if (is_one_of(name, known)) continue;
    std::string list;
    for (const std::string& each : known) list += (list.empty() ? "" : ", ") + each;
    throw ConfigError("bench: there is no case '" + name + "'", "the cases are " + list);
  }
  std::vector<bool> is_wanted;
  for (const std::string& name : known) is_wanted.push_back(wanted.empty() || is_one_of(name, wanted));
  return is_wanted;
}

bool run_cases(const std::vector<std::string>& names, const CaseOptions& options,
               const std::function<void(std::size_t, const PairOptions&)>& run) {
  // Waits of a few microseconds are part of links and computation that are emulated.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const Interrupt interrupt;
  PairOptions pairs;
  pairs.pairs = options.pairs;
  // A first look is to be short.
  pairs.most_pairs = options.pairs < pairs_of_a_figure ? options.pairs : std::max(options.pairs, pairs.most_pairs);
  pairs.stop = [&] { return interrupt.requested(); };
  for (std::size_t i = 0; i < names.size() && !interrupt.requested(); ++i) {
    std::fprintf(stderr, "%s ...\n", names[i].c_str());
    run(i, pairs);
  }
  return !interrupt.requested();
}

}  // namespace terrace
