#include "tools/bench_report.h"

#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/units.h"
#include "tools/formatted.h"
#include "tools/machine.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 1;

std::string milliseconds(double seconds) { return formatted("%.1f", 1e3 * seconds); }

std::string with_interval(const Interval& interval) {
  return formatted("%.3f [%.3f, %.3f]", interval.median, interval.low, interval.high);
}

/// That the target of the case is for.
std::string_view figure_of(const BenchCase& result) { return result.retained ? "retained" : "ratio"; }

std::string verdict_of(const BenchCase& result) {
  std::string text = result.target ? judged(figure_of(result), *result.target, result.verdict) : "-";
  for (const JudgedFigure& also : result.also_judged) text += ", " + judged(also.figure, also.target, also.verdict);
  return result.as_defined == false ? text + ", not as defined" : text;
}

std::string summary_table(const std::vector<BenchCase>& cases) {
  Rows rows{{"case", "ms", "floor ms", "ratio", "by phases", "bound by", "unmanaged ms", "retained", "stolen", "pairs",
             "target"}};
  for (const BenchCase& result : cases) {
    rows.push_back(
        {result.name, milliseconds(result.seconds), milliseconds(result.floor_seconds), with_interval(result.ratio),
         result.phased_ratio ? formatted("%.3f", result.phased_ratio->median) : "-", std::string(result.bound_by),
         result.unmanaged_seconds ? milliseconds(*result.unmanaged_seconds) : "-",
         result.retained ? with_interval(*result.retained) : "-",
         formatted("%.0f%% / %.0f%%", 100 * result.stolen_share, 100 * result.stolen_beside),
         std::to_string(result.pairs), verdict_of(result)});
  }
  return format_table(rows);
}

std::string terms_table(const std::vector<BenchCase>& cases) {
  Rows rows{{"terms, ms"}};
  for (const std::string_view name : term_names) rows[0].emplace_back(name);
  rows[0].insert(rows[0].end(), {"stalled", "demand fetches"});
  for (const BenchCase& result : cases) {
    rows.push_back({result.name});
    for (std::size_t term = 0; term < term_count; ++term) {
      const double seconds = result.terms[static_cast<Term>(term)];
      rows.back().push_back(seconds > 0 ? milliseconds(seconds) : "-");
    }
    rows.back().push_back(milliseconds(result.stall_seconds));
    rows.back().push_back(formatted("%.1f", result.demand_fetches));
  }
  return format_table(rows);
}

std::string traffic_table(const std::vector<BenchCase>& cases) {
  Rows rows{{"MB a step: moved / necessary"}};
  for (const Link link : all_links) rows[0].emplace_back(name_of(link));
  rows[0].emplace_back("ratio of all");
  for (const BenchCase& result : cases) {
    rows.push_back({result.name});
    for (const Link link : all_links) {
      rows.back().push_back(formatted("%.1f / %.1f", result.bytes_moved[index_of(link)] / 1e6,
                                      result.necessary_bytes[index_of(link)] / 1e6));
    }
    const std::optional<double> ratio = result.bytes_ratio();
    rows.back().push_back(ratio ? formatted("%.3f", *ratio) : "-");
  }
  return format_table(rows);
}

/// What of it was of which kind.
std::string kinds_table(const std::vector<BenchCase>& cases) {
  Rows rows{{"MB a step by kind"}};
  for (const Link link : all_links) rows[0].emplace_back(name_of(link));
  for (const BenchCase& result : cases) {
    for (const Kind kind : all_kinds) {
      rows.push_back({result.name + " " + std::string(name_of(kind))});
      double all = 0;
      for (const Link link : all_links) {
        const double bytes = result.bytes_moved_by_kind[index_of(link)][index_of(kind)];
        rows.back().push_back(formatted("%.1f", bytes / 1e6));
        all += bytes;
      }
      if (all == 0) rows.pop_back();
    }
  }
  return format_table(rows);
}

Json case_json(const BenchCase& result) {
  Json json;
  json["name"] = result.name;
  json["setting"] = result.setting;
  json["seconds"] = result.seconds;
  json["floor_seconds"] = result.floor_seconds;
  json["ratio"] = interval_json(result.ratio);
  if (result.phased_floor_seconds) json["phased_floor_seconds"] = *result.phased_floor_seconds;
  if (result.phased_ratio) json["phased_ratio"] = interval_json(*result.phased_ratio);
  json["bound_by"] = result.bound_by;
  for (std::size_t term = 0; term < term_count; ++term) {
    json["terms"][term_names[term]] = result.terms[static_cast<Term>(term)];
  }
  if (result.as_defined) json["as_defined"] = *result.as_defined;
  if (result.unmanaged_seconds) json["unmanaged_seconds"] = *result.unmanaged_seconds;
  if (result.retained) json["retained"] = interval_json(*result.retained);
  for (const Link link : all_links) {
    json["bytes_moved"][name_of(link)] = result.bytes_moved[index_of(link)];
    for (const Kind kind : all_kinds) {
      json["bytes_moved_by_kind"][name_of(link)][name_of(kind)] =
          result.bytes_moved_by_kind[index_of(link)][index_of(kind)];
    }
    json["necessary_bytes"][name_of(link)] = result.necessary_bytes[index_of(link)];
  }
  if (const auto ratio = result.bytes_ratio()) json["bytes_ratio"] = *ratio;
  json["stall_seconds"] = result.stall_seconds;
  json["demand_fetches"] = result.demand_fetches;
  json["stolen_share"] = {{"steps", result.stolen_share}, {"beside", result.stolen_beside}};
  json["pairs"] = result.pairs;
  if (result.target) json["target"] = target_json(figure_of(result), *result.target);
  json["verdict"] = name_of(result.verdict);
  json["also_judged"] = Json::array();
  for (const JudgedFigure& also : result.also_judged) {
    json["also_judged"].push_back({{"value", interval_json(also.value)},
                                   {"target", target_json(also.figure, also.target)},
                                   {"verdict", name_of(also.verdict)}});
  }
  return json;
}

}  // namespace

nlohmann::ordered_json interval_json(const Interval& interval) {
  return {{"median", interval.median}, {"low", interval.low}, {"high", interval.high}};
}

nlohmann::ordered_json target_json(std::string_view figure, const Target& target) {
  return {{"figure", figure},
          {"sense", target.sense == Target::Sense::at_most ? "at most" : "at least"},
          {"value", target.value}};
}

std::string judged(std::string_view figure, const Target& target, Verdict verdict) {
  return std::string(figure) + formatted(" %s %.2f: %s",
                                         target.sense == Target::Sense::at_most ? "<=" : ">=", target.value,
                                         name_of(verdict));
}

std::string bench_json(int version, int threads, const Json& common, const std::vector<Json>& cases) {
  Json json;
  json["version"] = version;
  json["machine"] = machine_json(threads);
  for (const auto& [name, value] : common.items()) json[name] = value;
  json["cases"] = cases;
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string to_text(const std::vector<BenchCase>& cases) {
  std::string text =
      summary_table(cases) + "\n" + terms_table(cases) + "\n" + traffic_table(cases) + "\n" + kinds_table(cases) + "\n";
  for (const BenchCase& result : cases) text += result.name + ": " + result.setting + "\n";
  if (const auto median = median_ratio(cases)) {
    text += formatted("median of the ratios to the floor of stand-ins: %.3f\n", *median);
  }
  return text;
}

std::string to_json(const std::vector<BenchCase>& cases, int threads) {
  std::vector<Json> all;
  for (const BenchCase& result : cases) all.push_back(case_json(result));
  Json common = Json::object();
  if (const auto median = median_ratio(cases)) common["median_ratio"] = *median;
  return bench_json(kVersion, threads, common, all);
}

}  // namespace terrace
