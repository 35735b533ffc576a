#include "tools/bench.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <sys/prctl.h>
#include <system_error>
#include <utility>

#include <ATen/Parallel.h>

#include "base/error.h"
#include "tools/bench_case.h"
#include "tools/bench_report.h"
#include "tools/interrupt.h"
#include "tools/real_cases.h"
#include "tools/stand_in_cases.h"

namespace terrace {
namespace {

struct Case {
  std::string name;
  bool needs_nvme;
  std::function<BenchCase(const std::filesystem::path& nvme, const PairOptions& options)> run;
};

Case stand_in(std::string name, const StandInCase& which) {
  return {std::move(name), true,
          [which](const auto& nvme, const auto& options) { return run_stand_in_case(which, nvme, options); }};
}

Case real(const char* name, StatesRest states) {
  return {name, states == StatesRest::nvme,
          [states](const auto& nvme, const auto& options) { return run_real_case(states, nvme, options); }};
}

/// Each bound with the parameters on the host, on NVMe and on both, and with four micro-batches.
std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const auto& [name, bound] : {std::pair{"compute-bound", Bound::compute}, std::pair{"link-bound", Bound::link},
                                    std::pair{"nvme-bound", Bound::nvme}, std::pair{"balanced", Bound::balanced}}) {
    const std::string base(name);
    cases.push_back(stand_in(base, {.bound = bound}));
    cases.push_back(stand_in(base + "-nvme", {.bound = bound, .nvme_share = 1}));
    cases.push_back(stand_in(base + "-mixed", {.bound = bound, .nvme_share = 0.5}));
    cases.push_back(stand_in(base + "-x4", {.bound = bound, .micro_batches = 4}));
  }
  cases.push_back(real("real-resident", StatesRest::host));
  cases.push_back(real("real-nvme", StatesRest::nvme));
  return cases;
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = make_cases();
  return cases;
}

std::vector<const Case*> chosen(const BenchStepOptions& options) {
  std::vector<const Case*> found;
  for (const Case& known : all_cases()) {
    const bool named = std::find(options.cases.begin(), options.cases.end(), known.name) != options.cases.end();
    if (named || options.cases.empty()) found.push_back(&known);
  }
  const std::vector<std::string> names = bench_step_cases();
  for (const std::string& name : options.cases) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    std::string list;
    for (const std::string& known : names) list += (list.empty() ? "" : ", ") + known;
    throw ConfigError("bench: there is no case '" + name + "'", "the cases are " + list);
  }
  for (const Case* one : found) {
    if (one->needs_nvme && options.nvme.empty()) {
      throw ConfigError("bench: the case " + one->name + " needs NVMe",
                        "say in which folder, as in --nvme /data/terrace, or choose others with --case");
    }
  }
  return found;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError("bench: making the folder " + folder.string() + " failed: " + error.message());
}

}  // namespace

std::vector<std::string> bench_step_cases() {
  std::vector<std::string> names;
  for (const Case& known : all_cases()) names.push_back(known.name);
  return names;
}

bool bench_step(const BenchStepOptions& options) {
  const std::vector<const Case*> cases = chosen(options);
  if (!options.nvme.empty()) make_folder(options.nvme);
  // Waits of a few microseconds are part of links and computation that are emulated.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const Interrupt interrupt;
  std::vector<BenchCase> results;
  for (const Case* one : cases) {
    if (interrupt.requested()) break;
    std::fprintf(stderr, "%s ...\n", one->name.c_str());
    PairOptions pairs;
    pairs.pairs = options.pairs;
    // Fewer are a first look, which is to be short.
    pairs.most_pairs = options.pairs < pairs_of_a_figure ? options.pairs : std::max(options.pairs, pairs.most_pairs);
    pairs.stop = [&] { return interrupt.requested(); };
    BenchCase result = one->run(options.nvme, pairs);
    if (result.pairs == 0) break;
    result.name = one->name;
    results.push_back(std::move(result));
  }
  std::fputs((options.json ? to_json(results, at::get_num_threads()) + "\n" : to_text(results)).c_str(), stdout);
  std::fflush(stdout);
  return !interrupt.requested();
}

}  // namespace terrace
