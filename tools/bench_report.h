/// The cases of `terrace bench` as tables for people and as JSON for programs.
#pragma once

#include <string>
#include <vector>

#include "tools/bench_case.h"

namespace terrace {

std::string to_text(const std::vector<BenchCase>& cases);
std::string to_json(const std::vector<BenchCase>& cases, int threads);

}  // namespace terrace
