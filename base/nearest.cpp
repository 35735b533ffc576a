#include "base/nearest.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace terrace {
namespace {

constexpr std::size_t kOtherTable = 2;  // what a name in another table costs at most

/// "a.b.c" as "a.b" and "c".
std::pair<std::string_view, std::string_view> split(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

std::size_t distance(std::string_view name, std::string_view candidate) {
  if (name.starts_with(candidate) && name.substr(candidate.size()).starts_with('.')) return 0;  // one part too many
  const auto [table, leaf] = split(name);
  const auto [candidate_table, candidate_leaf] = split(candidate);
  return edit_distance(leaf, candidate_leaf) + std::min(edit_distance(table, candidate_table), kOtherTable);
}

}  // namespace

// Optimal string alignment: Levenshtein's distance with swaps of neighbours, on three rows of its table.
std::size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> before_last(to.size() + 1), last(to.size() + 1), row(to.size() + 1);
  for (std::size_t j = 0; j <= to.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= from.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= to.size(); ++j) {
      const bool same = from[i - 1] == to[j - 1];
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last[to.size()];
}

std::string nearest_name(std::string_view name, std::span<const std::string> candidates) {
  const auto nearest = std::min_element(candidates.begin(), candidates.end(), [&](const auto& left, const auto& right) {
    return distance(name, left) < distance(name, right);
  });
  return nearest == candidates.end() ? std::string() : *nearest;
}

}  // namespace terrace
