#include "tools/text_table.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>

#include "tools/terminal.h"

namespace terrace {
std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<int> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], width_of(row[column]));
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t column = 0; column < row.size(); ++column) {
      const std::string padding(static_cast<std::size_t>(widths[column] - width_of(row[column])), ' ');
      line += column == 0 ? row[column] + padding : "  " + padding + row[column];
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string format_pairs(const std::vector<std::pair<std::string, std::string>>& pairs) {
  auto widest = width_of("");
  for (const auto& [name, what] : pairs) {
    if (!what.empty()) widest = std::max(widest, width_of(name));
  }
  std::string text;
  for (const auto& [name, what] : pairs) {
    text += name;
    if (!what.empty()) text += std::string(static_cast<std::size_t>(widest - width_of(name)) + 2, ' ') + what;
    text += '\n';
  }
  return text;
}

std::string format_duration(double seconds) {
  std::array<char, 40> text;
  const auto whole = static_cast<long long>(std::max(seconds, 0.0) + 0.5);
  if (seconds < 10) {
    std::snprintf(text.data(), text.size(), "%.1fs", std::max(seconds, 0.0));
  } else if (whole < 60) {
    std::snprintf(text.data(), text.size(), "%llds", whole);
  } else if (whole < 3600) {
    std::snprintf(text.data(), text.size(), "%lldm%02llds", whole / 60, whole % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%lldh%02lldm", whole / 3600, whole / 60 % 60);
  }
  return text.data();
}

}  // namespace terrace
