/// What every `terrace bench` says in the same way, and the cases of a step as tables for people and as JSON for
/// programs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/bench_case.h"
#include "tools/paired.h"

namespace terrace {

/// As every bench writes one: its median, low and high.
nlohmann::ordered_json interval_json(const Interval& interval);

/// The same of what a figure should be.
nlohmann::ordered_json target_json(std::string_view figure, const Target& target);

/// And of whether it is, for a table: "ratio <= 1.15: met".
std::string judged(std::string_view figure, const Target& target, Verdict verdict);

/// What a bench prints as JSON: the `version` of its format, the machine with LibTorch's `threads`, the fields of
/// `common`, which hold for all cases, and the cases. Bytes that are not UTF-8, as a folder's name may have, are
/// replaced.
std::string bench_json(int version, int threads, const nlohmann::ordered_json& common,
                       const std::vector<nlohmann::ordered_json>& cases);

std::string to_text(const std::vector<BenchCase>& cases);
std::string to_json(const std::vector<BenchCase>& cases, int threads);

}  // namespace terrace
