#include "tools/bench.h"

#include <cstdio>
#include <functional>
#include <system_error>
#include <utility>

#include <ATen/Parallel.h>

#include "base/error.h"
#include "tools/bench_case.h"
#include "tools/bench_report.h"
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

Case real(const char* name, StatesRest states, Computation computation = Computation::real) {
  return {name, states == StatesRest::nvme,
          [=](const auto& nvme, const auto& options) { return run_real_case(states, computation, nvme, options); }};
}

/// Each bound with the parameters on the host, on NVMe and on both, with four micro-batches, and with clipping.
std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const auto& [name, bound] : {std::pair{"compute-bound", Bound::compute}, std::pair{"link-bound", Bound::link},
                                    std::pair{"nvme-bound", Bound::nvme}, std::pair{"balanced", Bound::balanced}}) {
    const std::string base(name);
    cases.push_back(stand_in(base, {.bound = bound}));
    cases.push_back(stand_in(base + "-nvme", {.bound = bound, .nvme_share = 1}));
    cases.push_back(stand_in(base + "-mixed", {.bound = bound, .nvme_share = 0.5}));
    cases.push_back(stand_in(base + "-x4", {.bound = bound, .micro_batches = 4}));
    cases.push_back(stand_in(base + "-clipped", {.bound = bound, .clips = true}));
  }
  cases.push_back(real("real-resident", StatesRest::host));
  cases.push_back(real("real-nvme", StatesRest::nvme));
  cases.push_back(real("waited-nvme", StatesRest::nvme, Computation::waited));
  return cases;
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = make_cases();
  return cases;
}

std::vector<Case> wanted_cases(const BenchStepOptions& options) {
  std::vector<Case> wanted = wanted_cases(all_cases(), options);
  for (const Case& one : wanted) {
    if (one.needs_nvme && options.nvme.empty()) {
      throw ConfigError("bench: the case " + one.name + " needs NVMe",
                        "say in which folder, as in --nvme /data/terrace, or choose others with --case");
    }
  }
  return wanted;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError("bench: making the folder " + folder.string() + " failed: " + error.message());
}

}  // namespace

std::vector<std::string> bench_step_cases() { return names_of(all_cases()); }

bool bench_step(const BenchStepOptions& options) {
  const std::vector<Case> cases = wanted_cases(options);
  if (!options.nvme.empty()) make_folder(options.nvme);
  std::vector<BenchCase> results;
  const bool complete = run_cases(names_of(cases), options, [&](std::size_t i, const PairOptions& pairs) {
    BenchCase result = cases[i].run(options.nvme, pairs);
    if (result.pairs == 0) return;
    result.name = cases[i].name;
    results.push_back(std::move(result));
  });
  std::fputs((options.json ? to_json(results, at::get_num_threads()) + "\n" : to_text(results)).c_str(), stdout);
  std::fflush(stdout);
  return complete;
}

}  // namespace terrace
