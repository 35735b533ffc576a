#include "tools/update_bench.h"

#include <cstdio>
#include <utility>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "offload/nvme_paths.h"
#include "tools/bench_report.h"
#include "tools/formatted.h"
#include "tools/made_folders.h"
#include "tools/text_table.h"
#include "tools/update_case.h"

namespace terrace {
namespace {

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 2;

const std::vector<UpdateSetting>& all_settings() {
  static const std::vector<UpdateSetting> settings{
      {.name = "fp32-float32", .type = ElementType::float32, .states = "float32"},
      {.name = "bf16-split_bfloat16", .type = ElementType::bfloat16, .states = "split_bfloat16"},
  };
  return settings;
}

double milliseconds(double seconds) { return 1e3 * seconds; }

std::string with_interval(const Interval& interval) {
  return formatted("%.3f [%.3f, %.3f]", interval.median, interval.low, interval.high);
}

std::string_view bound_of(const UpdateCase& each) {
  return each.nvme_floor_seconds >= each.dram_floor_seconds ? "nvme" : "dram";
}

nlohmann::ordered_json hidden_json(const HiddenUpdate& behind) {
  nlohmann::ordered_json json;
  json["with_seconds"] = behind.with_seconds;
  json["without_seconds"] = behind.without_seconds;
  json["compute_over_update"] = behind.compute_over_update;
  json["hidden"] = interval_json(behind.hidden);
  json["pairs"] = behind.pairs;
  return json;
}

nlohmann::ordered_json to_json(const UpdateCase& each) {
  nlohmann::ordered_json json;
  json["name"] = each.setting.name;
  json["parameters"] = each.parameters;
  json["state_bytes"] = each.state_bytes;
  json["host_bytes"] = each.host_bytes;
  json["threads"] = each.threads;
  json["block_bytes"] = each.block_bytes;
  json["depth"] = each.depth;
  json["bytes_moved"] = {{name_of(Link::nvme_to_host), each.read_bytes},
                         {name_of(Link::host_to_nvme), each.written_bytes}};
  json["seconds"] = each.seconds;
  json["nvme_floor_seconds"] = each.nvme_floor_seconds;
  json["dram_floor_seconds"] = each.dram_floor_seconds;
  json["bound_by"] = bound_of(each);
  json["fraction"] = interval_json(each.fraction);
  json["together_seconds"] = each.together_seconds;
  json["fraction_of_together"] = interval_json(each.fraction_of_together);
  json["pairs"] = each.pairs;
  json["target"] = target_json("fraction", {Target::Sense::at_least, update_fraction_target});
  json["verdict"] = name_of(each.verdict);
  if (each.behind_forward.pairs > 0) {
    json["hidden"] = interval_json(each.behind_forward.hidden);
    json["behind_forward"] = hidden_json(each.behind_forward);
    json["behind_forward"]["target"] = target_json("hidden", {Target::Sense::at_least, update_hidden_target});
    json["behind_forward"]["verdict"] = name_of(each.behind_forward.verdict);
  }
  if (each.behind_step.pairs > 0) {
    json["behind_step"] = hidden_json(each.behind_step);
  }
  return json;
}

std::string alone_table(const std::vector<UpdateCase>& cases) {
  std::vector<std::vector<std::string>> rows{{"update alone", "parameters", "states", "read", "written", "ms",
                                              "nvme floor ms", "dram floor ms", "fraction", "of both at once", "pairs",
                                              "target"}};
  for (const UpdateCase& each : cases) {
    rows.push_back({each.setting.name, formatted("%.1fM", 1e-6 * static_cast<double>(each.parameters)),
                    formatted("%.0f MB", 1e-6 * static_cast<double>(each.state_bytes)),
                    formatted("%.0f MB", 1e-6 * each.read_bytes), formatted("%.0f MB", 1e-6 * each.written_bytes),
                    formatted("%.1f", milliseconds(each.seconds)),
                    formatted("%.1f", milliseconds(each.nvme_floor_seconds)),
                    formatted("%.1f", milliseconds(each.dram_floor_seconds)), with_interval(each.fraction),
                    with_interval(each.fraction_of_together), std::to_string(each.pairs),
                    judged("fraction", {Target::Sense::at_least, update_fraction_target}, each.verdict)});
  }
  return format_table(rows);
}

std::string hidden_table(const std::vector<UpdateCase>& cases) {
  std::vector<std::vector<std::string>> rows{
      {"update behind", "compute over update", "with ms", "without ms", "hidden", "pairs", "target"}};
  const auto add = [&](const std::string& name, const HiddenUpdate& behind, const std::string& target) {
    if (behind.pairs == 0) return;
    rows.push_back({name, formatted("%.2f", behind.compute_over_update),
                    formatted("%.1f", milliseconds(behind.with_seconds)),
                    formatted("%.1f", milliseconds(behind.without_seconds)), with_interval(behind.hidden),
                    std::to_string(behind.pairs), target});
  };
  for (const UpdateCase& each : cases) {
    add(each.setting.name + ", forward", each.behind_forward,
        judged("hidden", {Target::Sense::at_least, update_hidden_target}, each.behind_forward.verdict));
    add(each.setting.name + ", a step", each.behind_step, "");
  }
  return rows.size() == 1 ? "" : format_table(rows);
}

void print(const std::vector<UpdateCase>& cases, const BenchUpdateOptions& options) {
  if (!options.json) {
    std::printf("%s\n%s", alone_table(cases).c_str(), hidden_table(cases).c_str());
    return;
  }
  std::vector<nlohmann::ordered_json> list;
  for (const UpdateCase& each : cases) list.push_back(to_json(each));
  std::printf("%s\n", bench_json(kVersion, at::get_num_threads(), {{"folder", options.folder.string()}}, list).c_str());
}

}  // namespace

std::vector<std::string> bench_update_cases() { return names_of(all_settings()); }

bool bench_update(const BenchUpdateOptions& options) {
  const std::vector<UpdateSetting> settings = wanted_cases(all_settings(), options);
  const MadeFolders made({options.folder});
  make_nvme_folder(options.folder);
  std::vector<UpdateCase> cases;
  const bool complete = run_cases(names_of(settings), options, [&](std::size_t i, const PairOptions& pairs) {
    UpdateSetting setting = settings[i];
    setting.layers = options.layers;
    setting.folder = options.folder;
    UpdateCase result = measure_update(setting, pairs);
    if (result.pairs > 0) cases.push_back(std::move(result));
  });
  print(cases, options);
  return complete;
}

}  // namespace terrace
