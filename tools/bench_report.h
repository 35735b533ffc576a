/// The cases of `terrace bench` as tables for people and as JSON for programs.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/bench_case.h"
#include "tools/paired.h"

namespace terrace {

/// As every bench writes one: its median, low and high.
nlohmann::ordered_json interval_json(const Interval& interval);

std::string to_text(const std::vector<BenchCase>& cases);
std::string to_json(const std::vector<BenchCase>& cases, int threads);

}  // namespace terrace
