/// Tables and durations for people.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace terrace {

/// Rows of cells as lines: the first column aligned left, the others right. Cells are UTF-8.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

/// A name and what it is, as lines: both aligned left. A name of nothing is a title, however wide. UTF-8.
std::string format_pairs(const std::vector<std::pair<std::string, std::string>>& pairs);

/// "4.2s", "3m05s", "2h14m".
std::string format_duration(double seconds);

}  // namespace terrace
